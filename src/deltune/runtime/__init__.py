"""A delta on a live model: attach, use, mix, save, merge and detach."""
