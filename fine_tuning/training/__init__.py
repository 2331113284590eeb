"""How a job trains: the episodes of its rows, their grades, and the versions that come of it."""
