"""An exception that stands for the death of a process; tests put `crash` in place of a function."""


class Crash(Exception):
    """The process dies here."""


def crash(*_: object, **__: object) -> None:
    raise Crash
