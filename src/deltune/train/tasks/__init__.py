"""Tasks and task kinds: rows to batches, model outputs to predictions."""
