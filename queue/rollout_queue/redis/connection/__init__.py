"""The connection of a gateway's writer to Redis: a protocol, and two classes that implement it."""
