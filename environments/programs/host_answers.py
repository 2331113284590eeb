"""What the programs in this directory answer: what an environment says, in the form that the runner reads
(`environments/environment.py`), and lines of JSON, how they are read and written.

answer   {"id": 7, "ok": {…}}   or   {"id": 7, "error": "ValueError: …"}   or   {"id": 7, "ended": "…"}

`error` is what the library raised; `ended` says how the process ended that should have answered. This module
needs the standard library only.
"""

import json
import math
import os
from collections.abc import Iterator
from typing import Any

MOST_LINE = 32 * 2**20
"""The most bytes of one answer."""
CHUNK = 2**18


def answered(number: int, said: Any) -> bytes:
    """Raises ValueError for an answer that is no JSON, or that is too long for the runner."""
    line = json.dumps({"id": number, "ok": said}, allow_nan=False).encode() + b"\n"
    if len(line) > MOST_LINE:
        raise ValueError(f"the answer has {len(line)} bytes, and may have {MOST_LINE}")
    return line


def failed(number: int, error: str) -> bytes:
    return json.dumps({"id": number, "error": error}).encode() + b"\n"


def ended(number: int, why: str) -> bytes:
    return json.dumps({"id": number, "ended": why}).encode() + b"\n"


def write_all(descriptor: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(descriptor, left) :]


class LineBuffer:
    """Makes lines of pieces."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def __len__(self) -> int:
        """The bytes of the line that has begun."""
        return len(self._kept)

    def rest(self) -> bytes:
        """Take what has begun, and may never end."""
        rest, self._kept = bytes(self._kept), bytearray()
        return rest

    def add(self, piece: bytes) -> list[bytes]:
        """The lines that are whole now, each with its end."""
        end = piece.rfind(b"\n") + 1
        if not end:
            self._kept += piece
            return []
        whole = bytes(self._kept) + piece[:end]
        self._kept = bytearray(piece[end:])
        return [line + b"\n" for line in whole.split(b"\n")[:-1]]


class LineReader:
    """The lines that come from a descriptor, without a read more than is needed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._buffer, self._lines = LineBuffer(), list[bytes]()

    def __iter__(self) -> Iterator[bytes]:
        """The lines until the end; waits for each."""
        while self._lines or self.read():
            yield from self.taken()

    def first(self) -> bytes:
        """Waits for one line. Raises EOFError."""
        while not self._lines:
            if not self.read():
                raise EOFError("nobody speaks to this program")
        return self._lines.pop(0)

    def read(self) -> bool:
        """Read once. False at the end."""
        piece = os.read(self.descriptor, CHUNK)
        self._lines += self._buffer.add(piece)
        return bool(piece)

    def taken(self) -> list[bytes]:
        """The lines that have been read, and not taken yet."""
        lines, self._lines = self._lines, []
        return lines


SEEDS = 1_000_003
"""Tasks of one run's seed do not overlap with those of the next one."""


def seeded_tasks(seed: int, start: int, count: int) -> list[dict[str, Any]]:
    """Tasks that differ in their seed only."""
    seeds = range(seed * SEEDS + start, seed * SEEDS + start + count)
    return [{"id": str(each), "data": {"seed": each}} for each in seeds]


MOST_ERROR = 2000
"""The most characters of an error's text."""


class Mistake(Exception):
    """The user named what does not exist. The text is the whole sentence."""


def fault(error: BaseException) -> str:
    """An error as the runner tells it."""
    return str(error) if isinstance(error, Mistake) else f"{type(error).__name__}: {error}"[:MOST_ERROR]


def step(
    observation: Any,
    reward: Any = None,
    terminated: bool = False,
    truncated: bool = False,
    info: Any = None,
    player: int = 0,
    rewards: Any = None,
) -> dict[str, Any]:
    """The five values of Gymnasium's `step`. An observation is a text, a message or a list of messages."""
    said = {"messages": messages(observation), "player": player}
    said |= {"terminated": bool(terminated), "truncated": bool(truncated)}
    said |= {"reward": number(reward), "metrics": metrics(info)}
    return said | (
        {"rewards": {str(who): number(value) for who, value in rewards.items()}} if rewards else {}
    )


def messages(observation: Any) -> list[dict[str, Any]]:
    if observation is None or observation == "":
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [observation] if isinstance(observation, dict) else list(observation)


def number(value: Any) -> float | None:
    """A finite number, or None. Raises ValueError for NaN and infinity: they must not become rewards."""
    if value is None:
        return None
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"a reward must be finite, not {found}")
    return found


def metrics(info: Any) -> dict[str, float]:
    """The finite numbers of Gymnasium's `info`; the rest of it is the environment's own."""
    known = (info or {}).items()
    return {str(name): float(value) for name, value in known if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)
