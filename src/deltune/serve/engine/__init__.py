"""The engine of a server: a queue, continuous batches and caches over one frozen base model."""
