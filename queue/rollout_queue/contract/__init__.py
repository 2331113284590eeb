"""What the services agree on (the contract): records, their bytes, the stream's protocols. Knows no Redis."""
