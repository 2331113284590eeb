"""The operators' page: its files, who is signed in on it, and what it shows live."""
