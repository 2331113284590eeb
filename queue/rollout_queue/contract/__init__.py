"""What the services agree on: records, their bytes, the two ends of the stream. Knows no Redis."""
