"""Failures of the command line. Each message is a sentence that says what to do."""


class StackError(Exception):
    """The stack cannot start or go on. The message is printed for the user."""


class ServiceDied(StackError):
    """A service has ended that should be running."""
