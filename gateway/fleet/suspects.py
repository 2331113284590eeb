"""Finds the request that kills engines, among all that were on an engine when it died.

an engine dies ──▶ its calls are suspects ──▶ each is tried on another engine ──tokens──▶ cleared
                                                        └──that engine dies, too──▶ accused
accused ──▶ the new calls that were beside it are tried ──all are cleared, or time is over──▶ guilty: refused
                                                        └──one of them is guilty──▶ a suspect as before

One suspect at a time is tried on an engine, whichever gateway it has. Calls that are no suspects begin beside
it; if the engine dies, they decide. So no engine has to stay empty, two engines die of a request, and nobody
else is refused. All gateways know suspects and guilty requests for a while, so no retry is new.
"""

import asyncio
import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec import UNSET
from redis.asyncio import Redis

from gateway.cancellation import cancel_and_wait
from gateway.errors import KillsEngines
from gateway.fleet.generate_request import PromptImage, SamplingParameters
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored

logger = logging.getLogger(__name__)

REMEMBERED_S = 600.0
CURRENT_S = 2.0
"""No call goes to an engine by what its process read longer ago, and the error of a guilty request is told so
long after it was noted. So whichever process gets a retry knows the request."""
MOST_REMEMBERED = 1000
YOUNG_TOKENS = 16
"""A call that had fewer tokens of the engine that died is cleared by as many of the next engine; any other by
one, because only what comes after its tokens can have killed the engine."""
TRIAL_S = 60.0
"""So long a trial keeps others from its engine, if its gateway does not end it."""
MOST_WAIT_S = 30.0
"""A suspect that has waited for its trial for so long goes on beside others, and proves nothing."""
LOOK_AGAIN_S = 0.1
"""How often to look whether another gateway has ended its trial."""
DECIDED_WITHIN_S = 20.0
"""After this time, an accused request is guilty although a call that was beside it is still a suspect."""


def request_digest(ids: list[int], parameters: SamplingParameters, images: list[PromptImage]) -> str:
    """Identifies what an engine is asked for. A retry may have another seed and interval of events."""
    asked = msgspec.structs.replace(parameters, sampling_seed=UNSET, stream_interval=1)
    digest = hashlib.sha256(msgspec.json.encode(asked))
    digest.update(array("q", ids))
    for image in images:
        digest.update(image.png)
    return digest.hexdigest()[:32]


class SuspectTrial(NamedTuple):
    """A request, by its digest, that is tried on a server."""

    server_id: str
    digest: str

    @property
    def keys(self) -> tuple[key_names.Key, key_names.Key]:
        return key_names.trial(f"request:{self.digest}"), key_names.trial(f"server:{self.server_id}")

    def touches(self, other: "SuspectTrial") -> bool:
        """Whether both cannot be at once: another request on the server, or the request on another server."""
        return self != other and (self.server_id == other.server_id or self.digest == other.digest)


class Suspects:
    """What this process knows of suspects and guilty requests, and the trials that it holds."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.current_until = 0.0
        """Until when, by clock.monotonic(), what this process has read may be relied on."""
        self._reading = asyncio.Lock()
        self.guilty: dict[str, bool] = {}
        """By the digest of the request; False for a suspect."""
        self._noted_at: dict[str, float] = {}
        """When guilty requests were noted, in seconds since the epoch."""
        self._trials: Counter[SuspectTrial] = Counter()
        """How many calls of this process are in each trial."""
        self._ended = asyncio.Event()
        self._judging: dict[str, asyncio.Task[bool]] = {}
        """By the digest of an accused request."""

    async def close(self) -> None:
        """Leave the accused requests suspects."""
        await cancel_and_wait(list(self._judging.values()))

    async def refresh(self) -> None:
        """Read what any gateway has noted. Raises StorageUnavailable."""
        now, since = clock.monotonic(), clock.now() - REMEMBERED_S
        recent = (key_names.SUSPECTS, since, "+inf")
        # bounded: MOST_REMEMBERED are kept
        found = await stored(self._redis.zrange(*recent, byscore=True, withscores=True))
        guilty, noted_at = dict[str, bool](), dict[str, float]()
        for member, at in found:
            name, _, digest = member.decode().partition(":")
            guilty[digest] = guilty.get(digest, False) or name == "guilty"
            if name == "guilty":
                noted_at[digest] = at
        self.guilty, self._noted_at, self.current_until = guilty, noted_at, now + CURRENT_S

    async def renew(self) -> None:
        """Read as `refresh` does, unless a call that waited before this one has just done so."""
        async with self._reading:
            if (now := clock.monotonic()) < self.current_until:
                return
            try:
                await self.refresh()
            except StorageUnavailable:
                self.current_until = now + CURRENT_S  # without Redis, only this process takes care

    def verdict(self, digest: str) -> bool | None:
        """Whether the request is guilty; None for one that is no suspect."""
        return self.guilty.get(digest)

    async def known_to_all(self, digest: str) -> None:
        """Wait until all gateways know the guilty request. Only then its error is told."""
        left_s = self._noted_at.get(digest, 0.0) + CURRENT_S - clock.now()
        await clock.sleep(min(max(left_s, 0.0), CURRENT_S))

    async def note(self, digest: str, *, guilty: bool, beside: str = "") -> None:
        """Let all gateways know. `beside`: the id of the server that died, if the request may be the cause
        and was not tried there."""
        self.guilty[digest] = guilty or self.guilty.get(digest, False)
        now = clock.now()
        if guilty:
            self._noted_at[digest] = now
        try:
            async with self._redis.pipeline(transaction=False) as noting:
                noting.zadd(key_names.SUSPECTS, {f"{'guilty' if guilty else 'suspect'}:{digest}": now})
                noting.zremrangebyscore(key_names.SUSPECTS, "-inf", now - REMEMBERED_S)
                noting.zremrangebyrank(key_names.SUSPECTS, 0, -MOST_REMEMBERED - 1)
                if beside:
                    noting.sadd(key_names.beside_trial(beside), digest)  # bounded: one
                    noting.expire(key_names.beside_trial(beside), int(TRIAL_S))
                await stored(noting.execute())
        except StorageUnavailable as error:
            logger.warning("other gateways do not know which request may kill engines: %s", error)
        if guilty:
            await clock.sleep(CURRENT_S)

    async def clear(self, digest: str) -> None:
        """An engine has answered the request."""
        if not self.guilty.get(digest):
            self.guilty.pop(digest, None)
        try:
            await stored(self._redis.zrem(key_names.SUSPECTS, f"suspect:{digest}"))
        except StorageUnavailable as error:
            logger.warning("a cleared request stays a suspect: %s", error)

    async def begin_trial(self, trial: SuspectTrial) -> bool:
        """Whether the request may be tried on the server now. Calls of equal requests are tried together."""
        if trial.digest in self._judging or any(held.touches(trial) for held in self._trials):
            return False
        self._trials[trial] += 1
        begun = False
        try:
            begun = await self._hold(trial)
        finally:
            if not begun:
                self._leave(trial)
        return begun

    async def forget_beside(self, trial: SuspectTrial) -> None:
        """The engine of a trial that has begun lives: what died there before is another matter."""
        if self._trials[trial] == 1:
            with suppress(StorageUnavailable):
                await stored(self._redis.delete(key_names.beside_trial(trial.server_id)))  # bounded: one

    async def end_trial(self, trial: SuspectTrial) -> None:
        if self._leave(trial):
            try:
                await stored(self._redis.delete(*trial.keys))  # bounded: two
            except StorageUnavailable as error:
                logger.warning("a trial at %s hinders others until it expires: %s", trial.server_id, error)

    def is_judged(self, digest: str) -> bool:
        """Whether this process is about to know if the request is guilty."""
        return digest in self._judging

    async def judge(self, trial: SuspectTrial) -> bool:
        """Whether the request is guilty of the death of the server where it was tried. The trial is over, and
        equal requests wait for the verdict, which comes also if the caller leaves."""
        self._leave(trial)
        if (judging := self._judging.get(trial.digest)) is None:
            judging = self._judging[trial.digest] = asyncio.create_task(self._judge(trial))
        return await asyncio.shield(judging)

    async def _judge(self, trial: SuspectTrial) -> bool:
        logger.warning("%s died while the request %s was tried there", trial.server_id, trial.digest)
        request, server = trial.keys
        try:
            with suppress(StorageUnavailable):
                await stored(self._redis.set(request, "|".join(trial), px=int(TRIAL_S * 1000)))
                await stored(self._redis.delete(server))  # bounded: one
            if guilty := not await self._another_is_guilty(trial):
                logger.error("the request %s has killed two engines, and is refused", trial.digest)
                await self.note(trial.digest, guilty=True)
            return guilty
        finally:
            del self._judging[trial.digest]
            self._end()
            with suppress(StorageUnavailable):
                await stored(self._redis.delete(request))  # bounded: one

    async def _another_is_guilty(self, trial: SuspectTrial) -> bool:
        """Whether it was another request; not if each that was beside it is cleared, or the time is over."""
        complete_at = clock.monotonic() + CURRENT_S  # other gateways note what they have lost until then
        beside = set[str]()
        with suppress(TimeoutError):
            async with clock.timeout(DECIDED_WITHIN_S):
                while await self._read_beside(trial, beside) or clock.monotonic() < complete_at:
                    if any(self.verdict(digest) for digest in beside):
                        return True
                    await self.wait()
        return False

    async def _read_beside(self, trial: SuspectTrial, beside: set[str]) -> bool:
        """Add the requests that were beside it: another trial there forgets them. Returns whether one of them
        is a suspect, or guilty."""
        try:
            found = await stored(
                self._redis.srandmember(key_names.beside_trial(trial.server_id), MOST_REMEMBERED)
            )
            await self.refresh()
        except StorageUnavailable:
            return True
        beside |= {digest.decode() for digest in found} - {trial.digest}
        return any(self.verdict(digest) is not None for digest in beside)

    async def _hold(self, trial: SuspectTrial) -> bool:
        """Whether no other request is tried there, and this one nowhere else, by any gateway."""
        text = "|".join(trial)
        for number, key in enumerate(trial.keys):
            try:
                new = await stored(self._redis.set(key, text, nx=True, px=int(TRIAL_S * 1000)))
                if not new and await stored(self._redis.get(key)) != text.encode():
                    if number:
                        await stored(self._redis.delete(*trial.keys[:number]))  # bounded: one
                    return False
            except StorageUnavailable:
                return True  # without Redis, only this process takes care
        return True

    def _leave(self, trial: SuspectTrial) -> bool:
        """Whether this was the last call of the trial."""
        self._trials[trial] -= 1
        if self._trials[trial]:
            return False
        del self._trials[trial]
        self._end()
        return True

    def _end(self) -> None:
        """Wake those that wait for a trial."""
        self._ended.set()
        self._ended = asyncio.Event()

    async def wait(self) -> None:
        """Wait until a trial has ended, as far as this process can tell."""
        ended = self._ended
        with suppress(TimeoutError):
            async with clock.timeout(LOOK_AGAIN_S):
                await ended.wait()


@dataclass
class Case:
    """One call, which may become a suspect."""

    suspects: Suspects
    make_digest: Callable[[], str]
    needed: int = 0
    """How many tokens of its next engine clear the call; 0 if it is no suspect."""
    trial: SuspectTrial | None = None
    """The trial that it is in."""
    waited_s: float = 0.0
    _digest: str = ""

    @property
    def digest(self) -> str:
        if not self._digest:
            self._digest = self.make_digest()
        return self._digest

    async def check(self) -> None:
        """Raises KillsEngines if the request is guilty. It is a suspect if an equal one is."""
        if not self.suspects.guilty:
            return
        guilty = self.suspects.verdict(self.digest)
        if guilty:
            await self.suspects.known_to_all(self.digest)
            raise KillsEngines
        if guilty is not None and not self.needed:
            self.needed = YOUNG_TOKENS

    async def begin(self, server_id: str) -> bool:
        """Whether an attempt at the server may begin. A suspect needs a trial there; if it cannot have one
        yet, this waits for a moment."""
        if not self.needed:
            return True
        if self.waited_s >= MOST_WAIT_S and not self.suspects.is_judged(self.digest):
            return True
        trial = SuspectTrial(server_id, self.digest)
        if await self.suspects.begin_trial(trial):
            self.trial = trial
            return True
        began = clock.monotonic()
        await self.suspects.wait()
        self.waited_s += clock.monotonic() - began
        return False

    async def progressed(self, tokens: int) -> None:
        """The engine has given so many tokens."""
        if tokens >= self.needed:
            self.needed = 0
            await self.suspects.clear(self.digest)
            await self.end()

    async def died(self, server_id: str, tokens: int) -> None:
        """The engine has died after it gave so many tokens. Raises KillsEngines if the call is guilty."""
        young, trial, self.trial = tokens < YOUNG_TOKENS, self.trial, None
        if trial is not None and await self.suspects.judge(trial):
            raise KillsEngines
        self.needed, self.waited_s = YOUNG_TOKENS if young else 1, 0.0
        beside = server_id if young and trial is None else ""
        await self.suspects.note(self.digest, guilty=False, beside=beside)

    async def end(self) -> None:
        """The attempt has ended, or the call is cleared."""
        if self.trial is not None:
            trial, self.trial = self.trial, None
            await self.suspects.end_trial(trial)
