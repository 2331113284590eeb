"""The trainer's end of the command log on Redis."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from redis import Redis
from redis.commands.core import Script
from redis.exceptions import ResponseError

from rollout_queue import clock
from rollout_queue.commands.codec import decode_command, encode
from rollout_queue.commands.command import (
    SHARED,
    Command,
    LoadWeights,
    LoggedCommand,
    Refused,
    Save,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from rollout_queue.commands.log import Drop, Dropped
from rollout_queue.commands.result import Answer, Exported, Kept, Published, Result, Saved
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.redis import keys
from rollout_queue.redis.availability import available
from rollout_queue.redis.lease.lease import refused
from rollout_queue.redis.scripts import commands as scripts
from rollout_queue.redis.scripts import drops

UNREAD_TTL_S = 24 * 3600.0
"""How long a result that nobody has read is kept."""
NAMED = (*get_args(Save), LoadWeights)
FORGOTTEN = b"its record is removed"
"""Why a model has ended whose record is gone: no command can reach it."""
FREED_AT_ONCE = 200
"""How many commands one script removes: Redis serves nobody else meanwhile."""


class RedisCommandReader:
    """CommandReader on Redis. `redis` returns bytes (decode_responses off), `token` is of a claimed Lease."""

    def __init__(self, redis: Redis, token: str) -> None:
        self._redis, self._token = redis, token
        self._answer = redis.register_script(scripts.ANSWER)
        self._free = redis.register_script(scripts.FREE)
        self._forget_weights = redis.register_script(drops.FORGET_WEIGHTS)
        self._forget_adapter = redis.register_script(drops.FORGET_ADAPTER)

    def read(self, after: str, count: int, block_s: float) -> Sequence[LoggedCommand]:
        with available():
            block = max(1, int(block_s * 1000))
            streams: Any = self._redis.xread({keys.COMMANDS: after}, count=count, block=block)
        entries = streams[0][1] if streams else []
        return [
            LoggedCommand(position.decode(), fields[b"m"].decode(), int(fields[b"n"]), _command(fields[b"c"]))
            for position, fields in entries
        ]

    def answer(self, command: LoggedCommand, result: Result) -> None:
        request = command.request_id
        named = [keys.model(command.model_id), keys.result(request), keys.RESULTS_ANNOUNCED]
        named += [keys.RESULTS_UNREAD, keys.COMMANDS_HELD, keys.kept(command.model_id)]
        named += [keys.DROPPED, keys.DROPPED_ADAPTERS, keys.kept_terms(command.model_id), keys.KEPT_EXPIRES]
        ttl_ms = int(UNREAD_TTL_S * 1000)
        expires_at_ms = int(clock.now() * 1000) + ttl_ms
        of = command.command if isinstance(command.command, NAMED) else None
        packed = encode(Answer(result, of))
        arguments: list[str | bytes | float] = [request, command.number, packed, ttl_ms, expires_at_ms]
        self._fenced(self._answer, named, [*arguments, *_kept(command, result), command.model_id])

    def answered(self, request_ids: Sequence[str]) -> Sequence[bool]:
        if not request_ids:
            return []
        with available(), self._redis.pipeline(transaction=False) as pipeline:
            for request in request_ids:
                pipeline.exists(keys.result(request))
            return [bool(found) for found in pipeline.execute()]

    def free(self, position: str) -> None:
        arguments: list[str | bytes | float] = [position, FREED_AT_ONCE]
        while self._fenced(self._free, [keys.COMMANDS, keys.COMMANDS_HELD], arguments) == FREED_AT_ONCE:
            pass

    def held_bytes(self) -> tuple[int, int]:
        with available():
            held, most = self._redis.hmget(keys.COMMANDS_HELD, "bytes", "most")
        return int(held or 0), int(most or 0)

    def ended(self, model_ids: Collection[str]) -> Mapping[str, str]:
        if not model_ids:
            return {}
        with available(), self._redis.pipeline(transaction=False) as pipeline:
            for model_id in model_ids:
                pipeline.hmget(keys.model(model_id), "spec", "ended")
            found = zip(model_ids, pipeline.execute(), strict=True)
        reasons = {model_id: FORGOTTEN if spec is None else why for model_id, (spec, why) in found}
        return {model_id: why.decode() for model_id, why in reasons.items() if why is not None}

    def dropped(self) -> Dropped:
        with available(), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(keys.DROPPED)  # bounded: what was deleted since the trainer's last step
            pipeline.hgetall(keys.DROPPED_ADAPTERS)  # bounded: so, too
            weights, adapters = pipeline.execute()
        return Dropped(
            {_split(member): _drops(text.decode()) for member, text in weights.items()},
            {
                (policy, int(version)): place.decode()
                for (policy, version), place in ((_split(each), place) for each, place in adapters.items())
            },
        )

    def forget_weights(self, model_id: str, name: str, deleted: str) -> None:
        self._fenced(self._forget_weights, [keys.DROPPED], [f"{model_id}|{name}", deleted])

    def forget_adapter(self, policy: str, version: int) -> None:
        self._fenced(self._forget_adapter, [keys.DROPPED_ADAPTERS], [f"{policy}|{version}"])

    def _fenced(self, script: Script, named: Sequence[str], arguments: Sequence[str | bytes | float]) -> Any:
        """What the script answers. Raises LeaseLost when another trainer has claimed the lease since."""
        with available():
            try:
                return script([keys.FENCE, *named], [self._token, *arguments])
            except ResponseError as error:
                raise refused(error) or error from error


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
