"""The stream on Redis."""
