"""The HTTP layer of a server: OpenAI's API, classification, tagging, deltas, keys, limits, logs and metrics."""
