"""The papers' experiments: an extra that only `deltune study` imports."""
