"""Reads entries from the stream, and acknowledges them."""
