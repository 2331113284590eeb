"""A process that dies in the middle of something, as a test puts it there."""


class Crash(Exception):
    """The process dies here."""


def crash(*_: object, **__: object) -> None:
    raise Crash
