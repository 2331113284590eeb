"""What taught a version: the steps that made it out of the version before, and the turns that they trained.

version ─▶ steps, oldest first ─▶ sessions of each, by id ─▶ turns of each, by id
"""

import base64
import json
from collections.abc import Iterator
from typing import NamedTuple

from redis.asyncio import Redis
from typing_extensions import TypedDict

from gateway.errors import InvalidRequest, ObjectNotFound
from gateway.operators.training import trained_tokens
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.policies.trained_step import TrainedStep
from rollout_queue.redis.policies.lineage import heads_without_tokens, is_known, steps_of, trained_sessions

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
        raise InvalidRequest(f"{cursor[:300]!r} is no cursor of this list", param="cursor") from error
