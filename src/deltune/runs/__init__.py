"""One run: from a spec to a folder with a delta, its metrics and its predictions."""
