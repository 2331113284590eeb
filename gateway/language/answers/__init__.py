"""Answers: reads sampled ids as text, thoughts and calls, whole or while they arrive."""
