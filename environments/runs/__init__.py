"""One run: which task comes next, its groups of episodes, and how it is resumed and told."""
