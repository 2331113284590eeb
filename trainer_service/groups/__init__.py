"""From entries of the stream to groups whose members are compared."""
