"""Both ends of the command log on Redis.

gateway   takes commands in any order, and reads their results
trainer   reads the commands in order, answers them, and removes those that a checkpoint contains
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rollout_queue import clock
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import available, stored
from rollout_queue.redis.client_session_scripts import FORGET_RESULTS
from rollout_queue.redis.command_scripts import (
    ANSWER,
    DROP,
    END,
    FORGET_ADAPTER,
    FORGET_WEIGHTS,
    FREE,
    OPEN,
    READ_RESULT,
    SUBMIT,
)
from rollout_queue.redis.lua import Argument
from rollout_queue.trainer_commands import (
    SHARED,
    Answer,
    Command,
    Drop,
    Dropped,
    Exported,
    ForwardBackward,
    Kept,
    LoadWeights,
    LoggedCommand,
    Published,
    Refused,
    Result,
    Save,
    Saved,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    decode_answer,
    decode_command,
    decode_kept,
    encode,
    request_id,
)

UNREAD_TTL_S = 24 * 3600.0
"""How long a result that nobody has read is kept."""
NAMED = (*get_args(Save), LoadWeights)
FORGOTTEN = b"its record is removed"
"""Why a model has ended whose record is gone: no command can reach it."""
FREED_AT_ONCE = 200
"""How many commands one script removes: Redis serves nobody else meanwhile."""


class CommandReader:
    """The trainer's end. Every method raises StorageUnavailable, and LeaseLost if another trainer has claimed
    the lease. `redis` returns bytes (decode_responses off), `token` is of a claimed Lease."""

    def __init__(self, redis: Redis, token: str) -> None:
        self._redis, self._token = redis, token

    def read(self, after: str, count: int, block_s: float) -> Sequence[LoggedCommand]:
        """Up to `count` commands after this position, in order. Waits up to `block_s` for the first. A
        command that cannot be decoded comes as `Refused`."""
        with available():
            block = max(1, int(block_s * 1000))
            streams: Any = self._redis.xread({key_names.COMMANDS: after}, count=count, block=block)
        entries = streams[0][1] if streams else []
        return [
            LoggedCommand(position.decode(), fields[b"m"].decode(), int(fields[b"n"]), _command(fields[b"c"]))
            for position, fields in entries
        ]

    def answer(self, command: LoggedCommand, result: Result) -> None:
        """Store the result, and wake those who wait for it. Storing the same again changes nothing."""
        request = command.request_id
        named = [key_names.model(command.model_id), key_names.result(request), key_names.RESULTS_ANNOUNCED]
        named += [key_names.RESULTS_UNREAD, key_names.COMMANDS_HELD, key_names.kept(command.model_id)]
        named += [key_names.DROPPED, key_names.DROPPED_ADAPTERS, key_names.kept_terms(command.model_id)]
        named.append(key_names.KEPT_EXPIRES)
        ttl_ms = int(UNREAD_TTL_S * 1000)
        expires_at_ms = int(clock.now() * 1000) + ttl_ms
        of = command.command if isinstance(command.command, NAMED) else None
        packed = encode(Answer(result, of))
        arguments: list[Argument] = [request, command.number, packed, ttl_ms, expires_at_ms]
        arguments += [*_kept(command, result), command.model_id]
        ANSWER.run_as(self._token, self._redis, named, arguments)

    def answered(self, request_ids: Sequence[str]) -> Sequence[bool]:
        """Which of these commands have a result."""
        if not request_ids:
            return []
        with available(), self._redis.pipeline(transaction=False) as pipeline:
            for request in request_ids:
                pipeline.exists(key_names.result(request))
            return [bool(found) for found in pipeline.execute()]

    def free(self, position: str) -> None:
        """Remove the commands up to this position, which a durable checkpoint contains."""
        named, freed = [key_names.COMMANDS, key_names.COMMANDS_HELD], FREED_AT_ONCE
        while freed == FREED_AT_ONCE:
            freed = FREE.run_as(self._token, self._redis, named, [position, FREED_AT_ONCE])

    def held_bytes(self) -> tuple[int, int]:
        """The bytes of all commands in the log, and the most that it may hold. The closer they are, the
        sooner a checkpoint is due."""
        with available():
            held, most = self._redis.hmget(key_names.COMMANDS_HELD, "bytes", "most")
        return int(held or 0), int(most or 0)

    def ended(self, model_ids: Collection[str]) -> Mapping[str, str]:
        """Those of these models that no new command can reach, and why: their memory can be freed. A model
        that has ended once has ended for ever, also when its records are gone."""
        if not model_ids:
            return {}
        with available(), self._redis.pipeline(transaction=False) as pipeline:
            for model_id in model_ids:
                pipeline.hmget(key_names.model(model_id), "spec", "ended")
            found = zip(model_ids, pipeline.execute(), strict=True)
        reasons = {model_id: FORGOTTEN if spec is None else why for model_id, (spec, why) in found}
        return {model_id: why.decode() for model_id, why in reasons.items() if why is not None}

    def dropped(self) -> Dropped:
        """The weights that were deleted, before or after the commands that were read last."""
        with available(), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(key_names.DROPPED)  # bounded: what was deleted since the trainer's last step
            pipeline.hgetall(key_names.DROPPED_ADAPTERS)  # bounded: so, too
            weights, adapters = pipeline.execute()
        return Dropped(
            {_split(member): _drops(text.decode()) for member, text in weights.items()},
            {
                (policy, int(version)): place.decode()
                for (policy, version), place in ((_split(each), place) for each, place in adapters.items())
            },
        )

    def forget_weights(self, model_id: str, name: str, deleted: str) -> None:
        """Forget the deletions of these weights up to this place: their files are gone, and no replay begins
        before it."""
        arguments = [f"{model_id}|{name}", deleted]
        FORGET_WEIGHTS.run_as(self._token, self._redis, [key_names.DROPPED], arguments)

    def forget_adapter(self, policy: str, version: int) -> None:
        """Forget a version of an adapter: its files are gone."""
        named, arguments = [key_names.DROPPED_ADAPTERS], [f"{policy}|{version}"]
        FORGET_ADAPTER.run_as(self._token, self._redis, named, arguments)


def _kept(command: LoggedCommand, result: Result) -> tuple[str, bytes]:
    """The name and the record of what the command has made that lasts; empty for none."""
    made = command.command
    if isinstance(result, Saved) and isinstance(made, SaveWeights):
        name = f"weights/{made.name}"
    elif isinstance(result, Published) and isinstance(made, SaveForSampler):
        name = f"sampler_weights/{SHARED if made.shared else made.name}"
    elif isinstance(result, Exported) and isinstance(made, SaveExternal):
        name = f"external_weights/{made.name}"
    else:
        return "", b""
    return name, encode(Kept(result, command.number, clock.now(), command.position))


def _split(member: bytes) -> tuple[str, str]:
    first, _, last = member.decode().rpartition("|")
    return first, last


def _drops(text: str) -> list[Drop]:
    return [Drop(*each.split(">")) for each in text.split()]


def _command(packed: bytes) -> Command:
    try:
        return decode_command(packed)
    except (InvalidRecord, UnknownSchema) as error:
        return Refused(f"the trainer cannot read this command: {error}")


MOST_EARLY = 10_000
"""How far a command may be ahead of the next one of its model."""
RESULTS_AT_ONCE = 500
"""How many results one script removes: Redis serves nobody else meanwhile."""
KEPT_AT_ONCE = 500
"""How many fields one HSCAN reads."""
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
    """There is no such command or client session, or the result has expired."""


class CommandSubmissions:
    """The gateways' end. Every method raises StorageUnavailable."""

    def __init__(self, redis: AsyncRedis, most_bytes: Callable[[], int]) -> None:
        """`most_bytes` tells what the log may hold now."""
        self._redis, self._most_bytes = redis, most_bytes

    async def open(
        self, model_id: str, owner: str, spec: bytes, session_id: str | None = None
    ) -> bytes | Gone | None:
        """Make a model. Returns None, or the spec of the model that has this id already; Gone if it is of a
        client session that is gone."""
        named = [key_names.model(model_id), key_names.models_of(owner)]
        named += [] if session_id is None else [key_names.client_session(session_id)]
        found = await OPEN.run(self._redis, named, [model_id, spec, clock.now()])
        return Gone() if isinstance(found, int) else found

    async def spec(self, model_id: str) -> bytes | None:
        """The spec that `open` stored; None for an unknown model."""
        found: bytes | None = await stored(self._redis.hget(key_names.model(model_id), "spec"))
        return found

    async def submit(self, model_id: str, number: int, digest: str, command: Command) -> Submitted:
        """Store a command. Commands of a model are carried out in the order of their numbers, from 0 on."""
        named = [key_names.model(model_id), key_names.COMMANDS, key_names.COMMANDS_HELD]
        named.append(key_names.RESULTS_UNREAD)
        now_ms = int(clock.now() * 1000)
        arguments: list[Argument] = [model_id, number, digest, encode(command)]
        arguments += [self._most_bytes(), MOST_EARLY, now_ms, int(isinstance(command, ForwardBackward))]
        arguments.append(str(command.__struct_config__.tag))
        said = await SUBMIT.run(self._redis, named, arguments)
        return cast(Submitted, said[0].decode())

    async def end(self, model_id: str, why: str) -> bool:
        """Take no more commands for a model; the trainer frees it. Returns False if it has ended before, or
        does not exist."""
        named = [key_names.model(model_id), key_names.COMMANDS_HELD]
        return bool(await END.run(self._redis, named, [why]))

    async def result(self, model_id: str, number: int) -> Answer | Waiting | Gone:
        """The result of a command, if it has one. It can be read for READ_TTL_S after the first time."""
        request = request_id(model_id, number)
        named = [key_names.result(request), key_names.model(model_id), key_names.RESULTS_UNREAD]
        named.append(key_names.COMMANDS_HELD)
        said = await READ_RESULT.run(self._redis, named, [request, number, int(READ_TTL_S * 1000)])
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
            named = [key_names.RESULTS_UNREAD, key_names.COMMANDS_HELD, *map(key_names.result, requests)]
            await FORGET_RESULTS.run(self._redis, named, requests)

    async def kept(self, model_id: str) -> Mapping[str, Kept]:
        """The checkpoints of a model, its weights to sample from, and its exports: `weights/{name}`,
        `sampler_weights/{name}`, `external_weights/{name}`."""
        with available():
            found = self._redis.hscan_iter(key_names.kept(model_id), count=KEPT_AT_ONCE)
            return {name.decode(): decode_kept(packed) async for name, packed in found}

    async def kept_as(self, model_id: str, name: str) -> Kept | None:
        """What a model has made under this name."""
        found: Any = await stored(self._redis.hget(key_names.kept(model_id), name))
        return None if found is None else decode_kept(found)

    async def drop(self, model_id: str, name: str, number: int, *, expired_at: float | None = None) -> bool:
        """Delete what the command with this number has made under this name: commands that come from now on
        do not find it, and the trainer removes its files. Returns False if it is not there, or if its time is
        not over at `expired_at`."""
        named = [key_names.kept(model_id), key_names.kept_terms(model_id), key_names.KEPT_EXPIRES]
        named += [key_names.DROPPED, key_names.DROPPED_ADAPTERS, key_names.COMMANDS]
        arguments = (model_id, name, number, "" if expired_at is None else expired_at)
        return bool(await DROP.run(self._redis, named, arguments))

    async def is_full(self) -> bool:
        """Whether the log holds as much as it may, so that large commands are refused for now."""
        held, unread = await stored(self._redis.hmget(key_names.COMMANDS_HELD, "bytes", "unread"))
        return int(held or 0) + int(unread or 0) >= self._most_bytes()
