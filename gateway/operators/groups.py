"""One group: the rewards of its members, their advantages, and which step trained them."""

from collections.abc import Awaitable, Callable, Sequence
from math import fsum
from statistics import stdev

from redis.asyncio import Redis
from typing_extensions import TypedDict

from gateway.errors import ObjectNotFound
from gateway.operators.training import trained_tokens
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Verdict, VerdictCode
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.heads.listing import members_of
from rollout_queue.redis.policies.lineage import heads_without_tokens

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
    size: bytes | None = await stored(redis.hget(keys.group(group_id), "size"))
    names = await members_of(redis, group_id)
    if not names:
        raise ObjectNotFound(f"no group {group_id[:300]!r}")
    shown = names[:MOST_MEMBERS]
    heads = await heads_without_tokens(redis, shown)
    gone = [name for name in shown if name not in heads]
    stones: list[bytes | None] = await stored(redis.hmget(keys.DELETED, gone)) if gone else []
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
