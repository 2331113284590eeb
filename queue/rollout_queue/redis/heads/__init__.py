"""The head of a session: read from its hash, and kept in memory for the next call."""
