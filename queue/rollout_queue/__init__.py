"""The package that the services share: records, their codec, Redis keys, the stream and its two ends."""
