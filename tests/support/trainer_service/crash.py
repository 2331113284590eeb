"""An exception that stands for the death of a process; tests patch `crash` in where it should die."""


class Crash(Exception):
    """The process dies here."""


def crash(*_: object, **__: object) -> None:
    raise Crash
