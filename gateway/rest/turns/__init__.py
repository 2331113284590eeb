"""What the REST routes show of a session's turns: their shapes, drift, messages and tokens."""
