"""The HTTP clients that stream answers from engines."""
