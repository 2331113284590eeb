"""Makes rows of a session's turns, and packs rows into micro-batches."""
