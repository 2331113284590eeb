"""What passes between the stream's two ends: gateways write, the trainer reads.

    gateway ── append (record + session head, one transaction) ──▶ stream ── read ──▶ trainer
       ▲                                                             │
       └────────────── verdicts, in the head ◀── acknowledge ────────┘ after a durable checkpoint

The ends are `StreamWriter` and `StreamDeleter`, which are asynchronous because a gateway serves many calls at
once, and `StreamReader`, which blocks because a trainer has nothing else to do.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Record, Verdict

NO_IMAGES: Mapping[str, bytes] = {}
NO_TOKENS: Mapping[tuple[str, str], bytes] = {}


class Entry(msgspec.Struct, frozen=True, gc=False):
    """An entry of the stream: a record, with the id that Redis gave it."""

    entry_id: str
    record: Record


class Verdicts(NamedTuple):
    """Verdicts of sessions and of their turns, and the durable steps that trained them."""

    sessions: Mapping[str, Verdict]
    turns: Mapping[tuple[str, str], Verdict]
    """The keys are pairs of session id and turn id."""
    tokens: Mapping[tuple[str, str], bytes] = NO_TOKENS
    """The packed `TrainedTokens` of turns with the verdict `trained`, by the same keys."""
    steps: Sequence[TrainedStep] = ()


class GroupMembers(NamedTuple):
    """The sessions that were opened in a group, deleted ones too. `size` is None for a group of no fixed
    size."""

    size: int | None
    members: frozenset[str]
    forgotten: int = 0
    """How many members were forgotten, that is, removed some time after their verdict."""
