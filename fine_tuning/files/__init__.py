"""Uploaded files: their store, and the rows of a training file."""
