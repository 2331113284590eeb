"""What taught a version: the steps that made it out of the version before, and the turns that they trained.

version ─▶ steps, oldest first ─▶ sessions of each, by id ─▶ turns of each, by id

What the trainer has stored of a trained turn, as the REST routes show it.

One group: the rewards of its members, their advantages, and which step trained them.
"""

import base64
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from math import fsum
from statistics import stdev
from typing import NamedTuple

from redis.asyncio import Redis
from typing_extensions import TypedDict

from gateway.errors import InvalidRequest, ObjectNotFound
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.packed_tokens import TrainedTokens
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Verdict, VerdictCode
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.session_lists import (
    heads_without_tokens,
    is_known,
    members_of,
    steps_of,
    trained_sessions,
)

logger = logging.getLogger(__name__)


class TrainingShape(TypedDict):
    """The step that trained a turn, the version that it made, and one number for each output token. A ratio
    is null if the trainer's log-probability was not finite. A list is null if it was not recorded."""

    step: int
    version: int
    advantages: list[float] | None
    ratios: list[float | None] | None


def trained_tokens(head: SessionHead, turn_id: str) -> TrainedTokens | None:
    """What is stored of the tokens of a trained turn; None if nothing is, or if this build cannot read it."""
    packed = head.trained_tokens.get(turn_id)
    if packed is None:
        return None
    try:
        return TrainedTokens.unpack(packed)
    except (InvalidRecord, UnknownSchema) as error:
        logger.error("what a step used of turn %s cannot be read: %s", turn_id, error)
        return None


def training_of(head: SessionHead, turn_id: str, tokens: int) -> TrainingShape | None:
    """Of a turn with so many output tokens; None if no durable step has trained it."""
    verdict = head.turn_verdicts.get(turn_id)
    if verdict is None or verdict.code != "trained" or verdict.step is None or verdict.version is None:
        return None
    found = trained_tokens(head, turn_id)
    if found is None or found.tokens != tokens:
        found = TrainedTokens(tokens)
    return {
        "step": verdict.step,
        "version": verdict.version,
        "advantages": found.advantage_list,
        "ratios": found.ratio_list,
    }


SESSIONS_AT_ONCE = 100


class StepShape(TypedDict):
    """A durable step, and how much it trained. Sessions that were removed since count, too."""

    step: int
    version: int
    turns: int
    sessions: int
    tokens: int


class TrainedTurnShape(TypedDict):
    """A turn that a step trained. `reward` is its session's, `advantage_mean` the mean over its tokens."""

    turn_id: str
    session_id: str
    group_id: str | None
    step: int
    reward: float | None
    advantage_mean: float | None
    tokens: int | None


class LineageShape(TypedDict):
    version: int
    steps: list[StepShape]
    data: list[TrainedTurnShape]
    next_cursor: str | None


class LineagePlace(NamedTuple):
    """A turn of a lineage. Places are in the order of the list."""

    version: int
    session_id: str
    turn_id: str


async def lineage_of(redis: Redis, version: int, limit: int, cursor: str | None) -> LineageShape:
    """A page of the turns that taught a version. Raises ObjectNotFound, InvalidRequest and
    StorageUnavailable."""
    after = _place(cursor)
    steps = await steps_of(redis, version)
    if not steps and not await is_known(redis, version):
        raise ObjectNotFound(f"no policy has version {version}")
    found: list[tuple[LineagePlace, TrainedTurnShape]] = []
    for step in steps:
        if len(found) <= limit and (after is None or step.version >= after.version):
            found += await _turns(redis, step, after, limit + 1 - len(found))
    shown = found[:limit]
    return {
        "version": version,
        "steps": [_step(each) for each in steps],
        "data": [turn for _, turn in shown],
        "next_cursor": _cursor(shown[-1][0]) if len(found) > limit else None,
    }


async def _turns(
    redis: Redis, step: TrainedStep, after: LineagePlace | None, most: int
) -> list[tuple[LineagePlace, TrainedTurnShape]]:
    """Up to `most` turns of the step."""
    names = await trained_sessions(redis, step.version)
    if after is not None and after.version == step.version:
        names = [name for name in names if name >= after.session_id]
    found: list[tuple[LineagePlace, TrainedTurnShape]] = []
    at_once = min(SESSIONS_AT_ONCE, most)
    for start in range(0, len(names), at_once):
        page = names[start : start + at_once]
        heads = await heads_without_tokens(redis, page)
        rows = (row for name in page if name in heads for row in _rows(heads[name], step))
        found += [row for row in rows if after is None or row[0] > after]
        if len(found) >= most:
            break
    return found[:most]


def _rows(head: SessionHead, step: TrainedStep) -> Iterator[tuple[LineagePlace, TrainedTurnShape]]:
    session_id, group_id = head.spec.session_id, head.spec.group_id
    for turn_id, verdict in sorted(head.turn_verdicts.items()):
        if verdict.code != "trained" or verdict.version != step.version:
            continue
        tokens = trained_tokens(head, turn_id)
        yield (
            LineagePlace(step.version, session_id, turn_id),
            {
                "turn_id": turn_id,
                "session_id": session_id,
                "group_id": group_id,
                "step": step.step,
                "reward": head.reward,
                "advantage_mean": None if tokens is None else tokens.advantage_mean,
                "tokens": None if tokens is None else tokens.tokens,
            },
        )


def _step(step: TrainedStep) -> StepShape:
    return {
        "step": step.step,
        "version": step.version,
        "turns": step.turns,
        "sessions": step.sessions,
        "tokens": step.tokens,
    }


def _cursor(place: LineagePlace) -> str:
    """The place as text that needs no escaping in a URL."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def _place(cursor: str | None) -> LineagePlace | None:
    if cursor is None:
        return None
    try:
        version, session_id, turn_id = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        return LineagePlace(int(version), str(session_id), str(turn_id))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{cursor[:300]!r} is not a cursor of this list", param="cursor") from error


Verdicts = Callable[[Sequence[SessionHead]], Awaitable[Sequence[Verdict]]]
"""Finds the verdict of each session, or what it waits for."""
MOST_MEMBERS = 4096
"""How many members one reply has. A group of fixed size has fewer."""


class MemberShape(TypedDict):
    """A session of the group. `advantage` is the mean over its trained tokens. `verdict` is null if retention
    has removed the session."""

    session_id: str
    reward: float | None
    advantage: float | None
    verdict: VerdictCode | None
    step: int | None
    version: int | None


class GroupShape(TypedDict):
    """A group. `mean` and `std` (with n - 1) are those of the rewards of its members, before any shaping."""

    group_id: str
    size: int | None
    task_id: str | None
    mean: float | None
    std: float | None
    members: list[MemberShape]
    members_left_out: int


async def group_of(redis: Redis, verdicts_of: Verdicts, group_id: str) -> GroupShape:
    """Raises ObjectNotFound, StorageUnavailable."""
    size: bytes | None = await stored(redis.hget(key_names.group(group_id), "size"))
    names = await members_of(redis, group_id)
    if not names:
        raise ObjectNotFound(f"no group {group_id[:300]!r}")
    shown = names[:MOST_MEMBERS]
    heads = await heads_without_tokens(redis, shown)
    gone = [name for name in shown if name not in heads]
    stones: list[bytes | None] = await stored(redis.hmget(key_names.DELETED, gone)) if gone else []
    deleted = {name for name, stone in zip(gone, stones, strict=True) if stone is not None}
    verdicts = dict(zip(heads, await verdicts_of(list(heads.values())), strict=True))
    members = [
        _member(heads[name], verdicts[name]) if name in heads else _removed(name, deleted=name in deleted)
        for name in shown
    ]
    rewards = [each["reward"] for each in members if each["reward"] is not None]
    return {
        "group_id": group_id,
        "size": int(size) if size else None,
        "task_id": next((head.spec.task_id for head in heads.values() if head.spec.task_id), None),
        "mean": fsum(rewards) / len(rewards) if rewards else None,
        "std": stdev(rewards) if len(rewards) > 1 else None,
        "members": members,
        "members_left_out": len(names) - len(shown),
    }


def _member(head: SessionHead, verdict: Verdict) -> MemberShape:
    return {
        "session_id": head.spec.session_id,
        "reward": head.reward,
        "advantage": _advantage(head),
        "verdict": verdict.code,
        "step": verdict.step,
        "version": verdict.version,
    }


def _advantage(head: SessionHead) -> float | None:
    """The mean over the trained tokens of the session's turns."""
    found = [trained_tokens(head, turn_id) for turn_id in head.trained_tokens]
    weighted: Sequence[tuple[float, int]] = [
        (each.advantage_mean, each.tokens) for each in found if each and each.advantage_mean is not None
    ]
    tokens = sum(count for _, count in weighted)
    return fsum(mean * count for mean, count in weighted) / tokens if tokens else None


def _removed(session_id: str, *, deleted: bool) -> MemberShape:
    return {
        "session_id": session_id,
        "reward": None,
        "advantage": None,
        "verdict": "deleted" if deleted else None,
        "step": None,
        "version": None,
    }
