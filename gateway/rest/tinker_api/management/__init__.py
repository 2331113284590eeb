"""Management: lists what a client key has made, finds it, deletes it, and hands out its files."""
