"""What can go wrong on the way up, each as one sentence that says what to do."""


class StackError(Exception):
    """The stack cannot start or go on; the message is for the person at the terminal."""


class ServiceDied(StackError):
    """A service ended that should run."""
