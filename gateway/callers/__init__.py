"""Who calls: the check of keys, API keys, owners, and the limits of each."""
