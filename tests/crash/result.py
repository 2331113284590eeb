"""What is left of a crash run: which kills there were, what was heard meanwhile, what the audit found."""

from pathlib import Path

import msgspec


class Kill(msgspec.Struct, frozen=True):
    """What was done, and what it was found to have hit."""

    title: str
    """Of its window."""
    hit: bool
    """At the window's moment; else at another one."""
    healed_s: float
    answers: int
    """What agents heard success for since the kill before it, until all was well after this one."""


class Result(msgspec.Struct, frozen=True):
    """One run, as a file that can be added to others."""

    seed: int
    kills: tuple[Kill, ...]
    answers: int
    """All that the audit looked for; some came after the last kill."""
    findings: tuple[str, ...]


def write(result: Result, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(result) + b"\n")


def read(path: Path) -> Result:
    return msgspec.json.decode(path.read_bytes(), type=Result)
