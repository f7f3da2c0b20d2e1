"""Deciding the papers' claims from the results of a study."""
