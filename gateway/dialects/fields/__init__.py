"""Which fields of requests, and of the objects inside them, are served, accepted, refused, or unknown."""
