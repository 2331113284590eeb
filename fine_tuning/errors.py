"""What is wrong with a request or a file, in words for whoever sent it."""


class BadInput(Exception):
    """A field cannot be served. `param` names it as OpenAI's errors do."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class BadRow(Exception):
    """A line of a file is no row of a training file. The message names the line."""


class DirectoryInUse(Exception):
    """Another service has the directory."""
