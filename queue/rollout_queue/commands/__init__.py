"""The commands with which a user's own loop trains models: their records, their results, and the log."""
