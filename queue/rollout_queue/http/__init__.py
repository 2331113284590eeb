"""The HTTP conventions that every service keeps: the error body, keys, request ids, probes."""
