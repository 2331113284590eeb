"""The result of a crash run: its kills, the number of answers that agents received, the audit's findings."""

from pathlib import Path

import msgspec


class Kill(msgspec.Struct, frozen=True):
    """One kill, and whether it hit its window."""

    title: str
    """The title of the window."""
    hit: bool
    """Whether the kill hit the window. False if the moment did not come, or had passed."""
    healed_s: float
    """If it was not well again in time, the run has given up after this kill."""
    answers: int
    """How many successes agents were told of after the recovery from the previous kill, and until the
    recovery from this one."""


class Result(msgspec.Struct, frozen=True):
    """The result of one run. A table adds up several results."""

    seed: int
    kills: tuple[Kill, ...]
    answers: int
    """All successes that the audit checked, including those after the last kill."""
    findings: tuple[str, ...]
    gave_up: str | None = None
    """Why no further kill was made, although some were left; None if all were made."""


def write(result: Result, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(result) + b"\n")


def read(path: Path) -> Result:
    return msgspec.json.decode(path.read_bytes(), type=Result)
