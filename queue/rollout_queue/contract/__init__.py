"""What the services agree on: records, their bytes, and the protocols of the stream. Imports no Redis."""
