"""The HTTP messages between services: one class for each, which both ends import. Imports no service."""
