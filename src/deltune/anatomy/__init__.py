"""What a transformer is made of, observed in one traced forward pass."""
