"""How far sessions have come, without their turns: what they wait for, and with whom."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

from redis.asyncio import Redis

from rollout_queue.contract.codec import decode, decode_spec
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Outcome, SessionSpec
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

AT_ONCE = 100
"""Sessions that one script looks at, so that Redis is never busy with it for long."""

STAND = """
-- KEYS: session…   Returns spec, outcome, whether there is a verdict, and whether a reward, of each
local found = {}
for _, session in ipairs(KEYS) do
    local spec, outcome, verdict = unpack(redis.call('HMGET', session, 'spec', 'outcome', 'verdict'))
    local rewarded = 0
    if outcome and not verdict then
        for _, field in ipairs(redis.call('HKEYS', session)) do
            if string.sub(field, 1, 2) == 'r:' then rewarded = 1 break end
        end
    end
    found[#found + 1] = {spec or '', outcome or '', verdict and 1 or 0, rewarded}
end
return found
"""

Stage = Literal["open", "waiting_reward", "ended", "decided"]
"""It goes on; it has ended, and somebody is to reward it; the trainer has all of it; it has a verdict."""


class Standing(NamedTuple):
    """One session. `spec` is None where it was deleted, or never opened."""

    session_id: str
    stage: Stage
    spec: SessionSpec | None = None
    outcome: Outcome | None = None


class GroupStanding(NamedTuple):
    """How many sessions a group is made for, and how far they have come."""

    size: int
    ended: int
    """With all that the trainer needs of them: rewarded, or never to be."""
    open: int = 0
    unrewarded: int = 0

    @property
    def missing(self) -> int:
        """Never opened so far."""
        return max(0, self.size - self.ended - self.open - self.unrewarded)

    @property
    def lacks(self) -> str:
        """What it waits for, in words; empty when it is complete."""
        parts = [
            (self.open, "goes on", "go on"),
            (self.unrewarded, "waits for a reward", "wait for a reward"),
            (self.missing, "is not opened yet", "are not opened yet"),
        ]
        return ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in parts if count)


def group_standing(size: int | None, stages: Iterable[Stage]) -> GroupStanding:
    """`size` is None where nobody said; then it is as large as it is."""
    counted = list(stages)
    going, unrewarded = counted.count("open"), counted.count("waiting_reward")
    return GroupStanding(size or len(counted), len(counted) - going - unrewarded, going, unrewarded)


def stage_of(head: SessionHead) -> Stage:
    return _stage(head.outcome, head.verdict is not None, head.reward is not None)


async def standings(redis: Redis, session_ids: Sequence[str]) -> list[Standing]:
    """Raises StorageUnavailable. A session that is not there is `decided`: nobody waits for it."""
    script = redis.register_script(STAND)
    found: list[Standing] = []
    for start in range(0, len(session_ids), AT_ONCE):
        names = session_ids[start : start + AT_ONCE]
        replies: list[Any] = await stored(script([keys.session(name) for name in names]))
        found += [_standing(name, *reply) for name, reply in zip(names, replies, strict=True)]
    return found


def _standing(session_id: str, spec: bytes, outcome: bytes, decided: int, rewarded: int) -> Standing:
    if not spec:
        return Standing(session_id, "decided")
    ended = cast(Outcome, decode(outcome)) if outcome else None
    return Standing(session_id, _stage(ended, bool(decided), bool(rewarded)), decode_spec(spec), ended)


def _stage(outcome: Outcome | None, decided: bool, rewarded: bool) -> Stage:
    if decided:
        return "decided"
    if outcome is None:
        return "open"
    if rewarded or not outcome.train or outcome.status in ("failed", "abandoned"):
        return "ended"
    return "waiting_reward"
