"""The gateway's end of the command log: takes commands in any order, and reads their results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.commands.codec import decode_answer, decode_kept, encode
from rollout_queue.commands.command import Command, ForwardBackward, request_id
from rollout_queue.commands.result import Answer, Kept
from rollout_queue.redis import keys
from rollout_queue.redis.availability import available, stored
from rollout_queue.redis.scripts import commands as scripts
from rollout_queue.redis.scripts.client_sessions import FORGET_RESULTS
from rollout_queue.redis.scripts.drops import DROP

MOST_EARLY = 10_000
"""How far a command may be ahead of the next one of its model."""
RESULTS_AT_ONCE = 500
KEPT_AT_ONCE = 500
"""How many results one script removes: Redis serves nobody else meanwhile."""
READ_TTL_S = 900.0
"""How long a result can be read again, after it was read for the first time: its answer may be lost."""

Submitted = Literal["new", "known", "other", "unknown", "ended", "far", "full", "too large"]
"""What became of a command.

new         it is in the log, or waits for earlier ones of its model
known       it was there already, with the same content
other       its number was used already, with other content
unknown     there is no such model
ended       the model takes no more commands
far         too many commands before it are missing
full        the log holds as much as it may; the same command may be taken later
too large   one step of the optimizer would need more than the log may hold
"""


class Waiting(NamedTuple):
    """The command has no result yet."""


class Gone(NamedTuple):
    """There is no such command, or its result has expired."""


class CommandSubmissions:
    """Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis, most_bytes: Callable[[], int]) -> None:
        """`most_bytes` tells what the log may hold now."""
        self._redis, self._most_bytes = redis, most_bytes
        self._open = redis.register_script(scripts.OPEN)
        self._submit = redis.register_script(scripts.SUBMIT)
        self._read = redis.register_script(scripts.READ_RESULT)
        self._end = redis.register_script(scripts.END)
        self._drop = redis.register_script(DROP)
        self._forget_results = redis.register_script(FORGET_RESULTS)

    async def open(
        self, model_id: str, owner: str, spec: bytes, session_id: str | None = None
    ) -> bytes | Gone | None:
        """Make a model. Returns None, or the spec of the model that has this id already; Gone if it is of a
        client session that is gone."""
        named = [keys.model(model_id), keys.models_of(owner)]
        named += [] if session_id is None else [keys.client_session(session_id)]
        found: bytes | int | None = await stored(self._open(named, [model_id, spec, clock.now()]))
        return Gone() if isinstance(found, int) else found

    async def spec(self, model_id: str) -> bytes | None:
        """The spec that `open` stored; None for an unknown model."""
        found: bytes | None = await stored(self._redis.hget(keys.model(model_id), "spec"))
        return found

    async def submit(self, model_id: str, number: int, digest: str, command: Command) -> Submitted:
        """Store a command. Commands of a model are carried out in the order of their numbers, from 0 on."""
        named = [keys.model(model_id), keys.COMMANDS, keys.COMMANDS_HELD, keys.RESULTS_UNREAD]
        now_ms = int(clock.now() * 1000)
        arguments: list[str | bytes | int] = [model_id, number, digest, encode(command)]
        arguments += [self._most_bytes(), MOST_EARLY, now_ms, int(isinstance(command, ForwardBackward))]
        arguments.append(str(command.__struct_config__.tag))
        said: Sequence[Any] = await stored(self._submit(named, arguments))
        outcome: Submitted = said[0].decode()
        return outcome

    async def end(self, model_id: str, why: str) -> bool:
        """Take no more commands for a model; the trainer frees it. Returns False if it has ended before, or
        does not exist."""
        named = [keys.model(model_id), keys.COMMANDS_HELD]
        return bool(await stored(self._end(named, [why])))

    async def result(self, model_id: str, number: int) -> Answer | Waiting | Gone:
        """The result of a command, if it has one. It can be read for READ_TTL_S after the first time."""
        request = request_id(model_id, number)
        named = [keys.result(request), keys.model(model_id), keys.RESULTS_UNREAD, keys.COMMANDS_HELD]
        said = await stored(self._read(named, [request, number, int(READ_TTL_S * 1000)]))
        match said[0]:
            case b"done":
                return decode_answer(said[1])
            case b"waits":
                return Waiting()
            case _:
                return Gone()

    async def forget_results(self, model_id: str, count: int) -> None:
        """Remove the results of the first commands of a model, so many."""
        for first in range(0, count, RESULTS_AT_ONCE):
            numbers = range(first, min(first + RESULTS_AT_ONCE, count))
            requests = [request_id(model_id, number) for number in numbers]
            named = [keys.RESULTS_UNREAD, keys.COMMANDS_HELD, *map(keys.result, requests)]
            await stored(self._forget_results(named, requests))

    async def kept(self, model_id: str) -> Mapping[str, Kept]:
        """The checkpoints of a model, its weights to sample from, and its exports: `weights/{name}`,
        `sampler_weights/{name}`, `external_weights/{name}`."""
        with available():
            found = self._redis.hscan_iter(keys.kept(model_id), count=KEPT_AT_ONCE)
            return {name.decode(): decode_kept(packed) async for name, packed in found}

    async def kept_as(self, model_id: str, name: str) -> Kept | None:
        """What a model has made under this name."""
        found: Any = await stored(self._redis.hget(keys.kept(model_id), name))
        return None if found is None else decode_kept(found)

    async def drop(self, model_id: str, name: str, number: int, *, expired_at: float | None = None) -> bool:
        """Delete what the command with this number has made under this name: commands that come from now on
        do not find it, and the trainer removes its files. Returns False if it is not there, or if its time is
        not over at `expired_at`."""
        named = [keys.kept(model_id), keys.kept_terms(model_id), keys.KEPT_EXPIRES]
        named += [keys.DROPPED, keys.DROPPED_ADAPTERS, keys.COMMANDS]
        return bool(
            await stored(
                self._drop(named, [model_id, name, number, "" if expired_at is None else expired_at])
            )
        )

    async def is_full(self) -> bool:
        """Whether the log holds as much as it may, so that large commands are refused for now."""
        held, unread = await stored(self._redis.hmget(keys.COMMANDS_HELD, "bytes", "unread"))
        return int(held or 0) + int(unread or 0) >= self._most_bytes()
