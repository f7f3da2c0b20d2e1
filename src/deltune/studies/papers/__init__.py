"""The studies, claims and published numbers of each paper."""
