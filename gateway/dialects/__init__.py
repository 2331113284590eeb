"""The public wire shapes: each is read into the same calls, and writes their answers in its own shape."""
