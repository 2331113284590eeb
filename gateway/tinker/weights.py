"""The weights that models have saved: what clients said of them, and how they are deleted and expire."""

from collections.abc import Callable
from typing import Any, NamedTuple

from redis.asyncio import Redis

from gateway.errors import ObjectNotFound
from gateway.tinker.paths import KeptTerms, WeightsPath, encode_record, kept_path, read_terms
from rollout_queue import clock
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import available, stored
from rollout_queue.redis.client_session_scripts import NOTE_TERMS
from rollout_queue.redis.command_log import KEPT_AT_ONCE, CommandSubmissions
from rollout_queue.redis.command_scripts import CHANGE
from rollout_queue.trainer_commands import Kept

UNNAMED = "/~"
"""What the names contain of weights that a client samples from and does not name."""


class KeptWeights(NamedTuple):
    """Weights that a model has saved."""

    path: WeightsPath
    kept: Kept
    terms: KeptTerms

    @property
    def expires_at(self) -> float | None:
        """Seconds since the epoch; None: never."""
        return None if self.terms.ttl_s is None else self.kept.created_at + self.terms.ttl_s

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at < clock.now()

    @property
    def terms_field(self) -> str:
        return f"{self.path.kept_as}#{self.kept.number}"


class KeptWeightsStore:
    """Knows no owners: the caller has asked whether the client may do this. Every method may raise
    StorageUnavailable."""

    def __init__(self, redis: Redis, log: CommandSubmissions) -> None:
        self._redis, self._log = redis, log

    async def note_terms(self, path: WeightsPath, number: int, terms: KeptTerms) -> None:
        """What the client says of weights that the command with this number will save. The first stays."""
        if terms == KeptTerms():
            return
        named = [key_names.model(path.model_id), key_names.kept_terms(path.model_id)]
        await NOTE_TERMS.run(self._redis, named, [f"{path.kept_as}#{number}", encode_record(terms)])

    async def find(self, path: WeightsPath) -> KeptWeights | None:
        """What is kept under this path, expired or not."""
        kept = await self._log.kept_as(path.model_id, path.kept_as)
        if kept is None:
            return None
        field = f"{path.kept_as}#{kept.number}"
        terms: Any = await stored(self._redis.hget(key_names.kept_terms(path.model_id), field))
        if terms is None and await self._log.kept_as(path.model_id, path.kept_as) != kept:
            return None  # deleted meanwhile, with its terms
        return KeptWeights(path, kept, _terms(terms))

    async def named(self, path: WeightsPath) -> KeptWeights:
        """The named weights of a path. Raises ObjectNotFound if there are none, or none any more."""
        found = None if UNNAMED in path.kept_as else await self.find(path)
        if found is None or found.expired:
            raise ObjectNotFound(f"there are no weights {path}")
        return found

    async def all_kept(self, model_id: str) -> list[KeptWeights]:
        """The named weights of a model that have not expired, the newest first."""
        with available():
            found = self._redis.hscan_iter(key_names.kept_terms(model_id), count=KEPT_AT_ONCE)
            terms = {name.decode(): read_terms(packed) async for name, packed in found}
        kept = [
            KeptWeights(kept_path(model_id, name), each, terms.get(f"{name}#{each.number}", KeptTerms()))
            for name, each in (await self._log.kept(model_id)).items()
            if UNNAMED not in name
        ]
        return sorted((each for each in kept if not each.expired), key=lambda each: -each.kept.created_at)

    async def delete(self, weights: KeptWeights) -> bool:
        """Delete weights; the trainer removes their files. Returns False if they are gone already."""
        return await self._log.drop(weights.path.model_id, weights.path.kept_as, weights.kept.number)

    async def change(self, path: WeightsPath, change: Callable[[KeptWeights], KeptTerms]) -> None:
        """Replace what is known of named weights. Raises ObjectNotFound."""
        named = [key_names.kept(path.model_id), key_names.kept_terms(path.model_id), key_names.KEPT_EXPIRES]
        while True:
            before = await self.named(path)
            known: Any = await stored(self._redis.hget(named[1], before.terms_field))
            after = before._replace(terms=change(before._replace(terms=_terms(known))))
            ends = "" if after.expires_at is None else after.expires_at
            number = before.kept.number
            arguments = [path.model_id, path.kept_as, number, known or b"", encode_record(after.terms), ends]
            if await CHANGE.run(self._redis, named, arguments):
                return

    async def end_expired(self, most: int = 100) -> int:
        """Delete the weights whose time is over, at most so many. Returns how many there were."""
        now = clock.now()
        found: Any = await stored(
            self._redis.zrangebyscore(key_names.KEPT_EXPIRES, "-inf", now, start=0, num=most)
        )
        for member in found:
            model_id, name, number = member.decode().rsplit("|", 2)
            await self._log.drop(model_id, name, int(number), expired_at=now)
        return len(found)

    async def delete_all(self, model_id: str) -> int:
        """Delete all that a model has saved. Returns how many named weights that were."""
        named = 0
        for name, kept in (await self._log.kept(model_id)).items():
            dropped = await self._log.drop(model_id, name, kept.number)
            named += dropped and UNNAMED not in name
        return named

    async def drop_unnamed(self, model_id: str) -> None:
        """Delete what a model has published without a name: its client is gone."""
        for name, kept in (await self._log.kept(model_id)).items():
            if UNNAMED in name:
                await self._log.drop(model_id, name, kept.number)


def _terms(packed: bytes | None) -> KeptTerms:
    return KeptTerms() if packed is None else read_terms(packed)
