"""Serve many deltas on one frozen backbone: an engine with continuous batches, and an HTTP server over it."""
