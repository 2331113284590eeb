"""The REST routes, with the shapes of their bodies and replies."""
