"""Tasks as values, and the kinds of tasks: rows to batches, outputs to predictions."""
