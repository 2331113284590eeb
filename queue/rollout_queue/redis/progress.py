"""Reads how far sessions have come, without reading their turns."""

from collections.abc import Sequence
from typing import Any, cast

from redis.asyncio import Redis

from rollout_queue.contract.codec import decode, decode_spec
from rollout_queue.contract.progress import SessionProgress, stage
from rollout_queue.contract.records import Outcome
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.heads.reading import UNREADABLE
from rollout_queue.redis.scripts import sessions as session_scripts

SESSIONS_PER_SCRIPT = 20
"""Redis serves nobody else while a script runs, so no script looks at more sessions than this."""


async def progress_of(redis: Redis, session_ids: Sequence[str]) -> list[SessionProgress]:
    """The progress of each session, in the order of `session_ids`. Raises StorageUnavailable.

    A session that does not exist is `decided`, because nobody waits for it.
    """
    script = redis.register_script(session_scripts.PROGRESS)
    found: list[SessionProgress] = []
    for start in range(0, len(session_ids), SESSIONS_PER_SCRIPT):
        names = session_ids[start : start + SESSIONS_PER_SCRIPT]
        replies: list[Any] = await stored(script([keys.session(name) for name in names]))
        found += [_progress(name, *reply) for name, reply in zip(names, replies, strict=True)]
    return found


def _progress(
    session_id: str, spec: bytes, outcome: bytes, has_verdict: int, has_reward: int
) -> SessionProgress:
    if not spec:
        return SessionProgress(session_id, "decided")
    try:
        ended = cast(Outcome, decode(outcome)) if outcome else None
        reached = stage(ended, has_verdict=bool(has_verdict), has_reward=bool(has_reward))
        return SessionProgress(session_id, reached, decode_spec(spec), ended)
    except UNREADABLE:
        reached = "decided" if has_verdict else "open"
        if outcome and not has_verdict:
            reached = "ended" if has_reward else "waiting_reward"
        return SessionProgress(session_id, reached, readable=False)
