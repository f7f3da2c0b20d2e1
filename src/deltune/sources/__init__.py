"""What comes from outside: models, and rows of data checked before any training."""
