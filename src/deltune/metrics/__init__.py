"""Metrics, each with statistics of every example and a signature."""
