"""What requests share: built at the start, kept up to date by periodic tasks, closed at the end."""
