"""Serve many deltas on one frozen base model: an engine with continuous batches, and an HTTP server over it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
