"""The contract: the services' agreement on records, their bytes and the protocols of the stream; no Redis."""
