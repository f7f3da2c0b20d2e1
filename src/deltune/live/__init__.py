"""A live model: deltas attached, used, merged, saved and loaded."""
