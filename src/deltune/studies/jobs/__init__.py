"""Running many jobs: scheduling, workers and the result store."""
