"""The journal of a run: a line of JSON for each group that was begun and each episode that ended.

run/environments/NAME/run.json        the settings, and what the environment said of itself
run/environments/NAME/journal.jsonl   {"group": …}  {"episode": …}  …

A kill can cut the last line; a reader leaves it out, and the gateway knows what became of that episode.
"""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import msgspec

from environments.errors import RunStopped
from environments.outcome import Status


class GroupBegun(msgspec.Struct, frozen=True, tag_field="kind", tag="group"):
    """`visit` is the place of its task in the run's order. `attempt` counts how often a resumed run began
    it."""

    group: int
    visit: int
    task_id: str
    members: tuple[int, ...]
    attempt: int = 0


class EpisodeEnded(msgspec.Struct, frozen=True, tag_field="kind", tag="episode"):
    """One agent's episode. `versions` are the policy versions that sampled its tokens, where they were asked
    for."""

    group: int
    member: int
    seat: int
    session_id: str
    task_id: str
    status: Status
    reward: float | None
    turns: int
    seconds: float
    ended_at: float
    reason: str | None = None
    versions: tuple[int, ...] = ()
    metrics: dict[str, float] = {}


Entry = GroupBegun | EpisodeEnded


class Journal:
    """Appends entries; each one is with the operating system before the next episode can begin."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal.jsonl"
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        """Raises RunStopped if another process plays this run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RunStopped(f"another process plays the run in {self._path.parent}") from None
        _cut_last_line(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def add(self, entry: Entry) -> None:
        if self._file is None:
            raise RuntimeError("the journal is not open")
        self._file.write(msgspec.json.encode(entry).decode() + "\n")
        self._file.flush()


def entries_of(directory: Path) -> list[Entry]:
    """The whole lines of a journal, in their order; none if there is no journal."""
    return list(each_entry(directory))


def each_episode(directory: Path) -> Iterator[EpisodeEnded]:
    """The episodes of a journal, in the order in which they ended, one at a time."""
    return (each for each in each_entry(directory) if isinstance(each, EpisodeEnded))


def each_entry(directory: Path) -> Iterator[Entry]:
    """As `entries_of`, one at a time: a journal may have millions."""
    path = directory / "journal.jsonl"
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(Entry)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)


def _cut_last_line(path: Path) -> None:
    """Remove what follows the last line break, so that the next entry begins a line."""
    if path.exists() and (written := path.read_bytes()) and not written.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(written.rfind(b"\n") + 1)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write JSON to a new file that then takes the place of the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)
