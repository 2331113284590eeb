"""The HTTP conventions of every service: the error body, keys, request ids, probes."""
