"""Episodes: agents in their sessions, from the first call to the outcome."""
