"""The parts of a transformer, observed in one traced forward pass."""
