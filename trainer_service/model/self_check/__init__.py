"""Checks of the base model against itself when the trainer starts."""
