"""Turns in, weights out: a DeepSpeed loop with a small REST API."""
