"""Several models over one base model in one process, each with its own optimizer."""
