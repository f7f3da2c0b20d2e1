"""Metrics with per-example statistics and signatures."""
