"""Episodes that a library plays itself, in sessions of this run."""
