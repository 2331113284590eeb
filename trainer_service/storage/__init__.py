"""Stores checkpoints and published versions on disk."""
