"""The papers' studies as values, at both scales."""
