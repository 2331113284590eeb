"""Cuts an acknowledgement into pages. Each page is one script, for which Redis serves nobody else.

verdicts of turns ─▶ steps and verdicts of sessions ─▶ entries

Entries come last, so a trainer that ends between two pages leaves some of them, and the next one acknowledges
all again: repeating changes nothing. Verdicts of sessions come after those of their turns, because the next
trainer leaves a session with a verdict as it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from rollout_queue.contract.policies.trained_step import TrainedStep
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import keys

ITEMS = 250
"""How many turns, sessions, steps and entries a page has at most: 1 to 3 ms of Redis."""
TOGETHER = 512
"""Up to so many sessions get their verdicts in one page, so that their group ends as a whole: 6 ms."""
BYTES = 2**20
"""How many bytes of verdicts and tokens a page has about, at most."""
STEPS_KEPT = 50_000
"""How many of the last steps Redis keeps, as what made each version: about 10 MB."""


class StoredVerdict(NamedTuple):
    """A verdict as a session's hash has it."""

    session_id: str
    field: str
    verdict: bytes
    version: int | str = ""
    """The version that a session has trained."""
    tokens: bytes = b""
    """What a step used of a turn's tokens."""

    @property
    def size(self) -> int:
        return len(self.verdict) + len(self.tokens)


class Page(NamedTuple):
    """What one script writes and acknowledges."""

    verdicts: Sequence[StoredVerdict] = ()
    steps: Sequence[TrainedStep] = ()
    entry_ids: Sequence[str] = ()

    def arguments(self) -> tuple[list[str], list[str | bytes | int]]:
        """Keys and arguments of ACKNOWLEDGE."""
        places: dict[str, int] = {}
        arguments: list[str | bytes | int] = [keys.GROUP, len(self.entry_ids), len(self.steps), STEPS_KEPT]
        arguments += self.entry_ids
        for step in self.steps:
            arguments += (step.version, msgspec.json.encode(step))
        for each in self.verdicts:
            place = places.setdefault(each.session_id, len(places) + 1)
            arguments += (place, *each)
        named = [keys.STREAM, keys.VERDICTS, keys.DEADLINES, keys.SETTLED, keys.TRAINED, keys.STEPS]
        return [*named, *map(keys.session, places)], arguments


def pages(entry_ids: Sequence[str], verdicts: Verdicts) -> Iterator[Page]:
    """The pages in the order in which they are sent; one if all of it fits."""
    count = len(entry_ids) + len(verdicts.steps) + len(verdicts.sessions) + len(verdicts.turns)
    tokens = sum(map(len, verdicts.tokens.values()))
    if count <= ITEMS and tokens <= BYTES:
        yield Page([*_of_turns(verdicts), *_of_sessions(verdicts)], verdicts.steps, entry_ids)
        return
    yield from map(Page, _cut(_of_turns(verdicts), ITEMS))
    for first in range(0, len(verdicts.steps), ITEMS):
        yield Page(steps=verdicts.steps[first : first + ITEMS])
    together = TOGETHER if len(verdicts.sessions) <= TOGETHER else ITEMS
    yield from map(Page, _cut(_of_sessions(verdicts), together))
    for first in range(0, len(entry_ids), ITEMS):
        yield Page(entry_ids=entry_ids[first : first + ITEMS])


def _cut(stored: Iterable[StoredVerdict], most: int) -> Iterator[list[StoredVerdict]]:
    """At most so many at once, and about BYTES."""
    page, size = list[StoredVerdict](), 0
    for each in stored:
        if len(page) == most or (page and size + each.size > BYTES):
            yield page
            page, size = [], 0
        page.append(each)
        size += each.size
    if page:
        yield page


def _of_turns(verdicts: Verdicts) -> Iterator[StoredVerdict]:
    for (session_id, turn_id), verdict in verdicts.turns.items():
        tokens = verdicts.tokens.get((session_id, turn_id), b"")
        packed = msgspec.json.encode(verdict)
        yield StoredVerdict(session_id, f"v:{turn_id}", packed, tokens=tokens)


def _of_sessions(verdicts: Verdicts) -> Iterator[StoredVerdict]:
    for session_id, verdict in verdicts.sessions.items():
        version = verdict.version if verdict.code == "trained" else None
        packed = msgspec.json.encode(verdict)
        yield StoredVerdict(session_id, "verdict", packed, "" if version is None else version)
