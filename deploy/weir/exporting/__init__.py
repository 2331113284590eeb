"""Copies a trained model out of a run."""
