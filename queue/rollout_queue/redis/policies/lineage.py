"""Reads what made a version: the steps since the version before, and the sessions that each step trained.

weir:steps   ── a chain of steps, back to a registered version ──▶ TrainedStep, …
weir:trained ── the sessions of one step ──▶ their heads without tokens
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.policies.trained_step import TrainedStep, chain
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.heads.reading import readable_head

STEPS_AT_ONCE = 64
MOST_STEPS = 1024
"""How many steps one version can be traced back."""
NAMES_AT_ONCE = 1000
SESSIONS_AT_ONCE = 100
NOT_READ = (b"t:", b"q:", b"e:")
"""Fields with tokens, which are most of a session, and marks of retried requests."""


async def steps_of(redis: Redis, version: int) -> list[TrainedStep]:
    """The steps that made `version` out of the registered version before it, oldest first; as far as Redis
    has them. Raises StorageUnavailable."""
    steps: list[TrainedStep] = []
    while len(steps) < MOST_STEPS and (chained := await _chain(redis, version)):
        registered = await _registered(redis, [step.base for step in chained])
        for step in chained:
            steps.append(step)
            if step.base in registered:
                return steps[::-1]
        version = chained[-1].base
    return steps[::-1]


async def is_known(redis: Redis, version: int) -> bool:
    """Whether the version was registered, or made by a step that Redis has. Raises StorageUnavailable."""
    made = await stored(redis.zcount(keys.STEPS, version, version))
    return bool(made) or bool(await _registered(redis, [version]))


async def trained_sessions(redis: Redis, version: int) -> list[str]:
    """The ids of the sessions that the step which made `version` has trained, sorted. Deleted and forgotten
    ones are not among them. Raises StorageUnavailable."""
    names: list[str] = []
    while True:
        page: Any = await stored(
            redis.zrange(keys.TRAINED, version, version, byscore=True, offset=len(names), num=NAMES_AT_ONCE)
        )
        names += [name.decode() for name in page]
        if len(page) < NAMES_AT_ONCE:
            return sorted(set(names))


async def heads_without_tokens(redis: Redis, session_ids: Sequence[str]) -> Mapping[str, SessionHead]:
    """The readable sessions among these, by id; `turns` is empty, and the verdicts of turns are there. Raises
    StorageUnavailable."""
    heads: dict[str, SessionHead] = {}
    for start in range(0, len(session_ids), SESSIONS_AT_ONCE):
        page = session_ids[start : start + SESSIONS_AT_ONCE]
        async with redis.pipeline(transaction=False) as pipeline:
            for name in page:
                pipeline.hkeys(keys.session(name))
            listed = dict(zip(page, await stored(pipeline.execute()), strict=True))
        wanted = {
            name: [each for each in fields if each[:2] not in NOT_READ] for name, fields in listed.items()
        }
        wanted = {name: fields for name, fields in wanted.items() if fields}
        async with redis.pipeline(transaction=False) as pipeline:
            for name, fields in wanted.items():
                pipeline.hmget(keys.session(name), fields)
            replies = await stored(pipeline.execute())
        for (name, fields), values in zip(wanted.items(), replies, strict=True):
            there = {field: value for field, value in zip(fields, values, strict=True) if value is not None}
            if (head := readable_head(name, there)) is not None:
                heads[name] = head
    return heads


async def _chain(redis: Redis, version: int) -> list[TrainedStep]:
    """Up to STEPS_AT_ONCE steps that led to `version`, the last one first; none if no step made it."""
    found: Any = await stored(
        redis.zrange(keys.STEPS, version, "-inf", desc=True, byscore=True, offset=0, num=STEPS_AT_ONCE)
    )
    steps = [msgspec.json.decode(packed, type=TrainedStep) for packed in found]
    return chain(version, {step.version: step for step in steps})


async def _registered(redis: Redis, versions: Iterable[int]) -> set[int]:
    """Those of these versions that were ever registered."""
    asked = list(versions)
    if not asked:
        return set()
    async with redis.pipeline(transaction=False) as pipeline:
        for version in asked:
            pipeline.hexists(keys.POLICIES, str(version))
            pipeline.sismember(keys.REMOVED, str(version))
        replies = await stored(pipeline.execute())
    flags = zip(replies[::2], replies[1::2], strict=True)
    return {version for version, each in zip(asked, flags, strict=True) if any(each)}
