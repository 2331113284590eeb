"""What the trainer reads from the stream, and what it acknowledges."""
