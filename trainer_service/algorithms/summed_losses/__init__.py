"""The losses of a user's own loop, which are plain sums."""
