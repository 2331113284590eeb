"""A log of commands in memory."""

from collections.abc import Collection, Mapping, Sequence

from rollout_queue.redis.command_log import CommandReader
from rollout_queue.trainer_commands import (
    Answer,
    Command,
    Drop,
    Dropped,
    LoggedCommand,
    Result,
    decode_answer,
    decode_command,
    encode,
)


class Killed(BaseException):
    """The process ends here, and nothing is cleaned up."""


class MemoryCommandLog(CommandReader):
    """Both ends of a log. It stays as it is when a trainer that reads it is gone."""

    def __init__(self) -> None:
        self._commands: list[LoggedCommand] = []
        self._numbers: dict[str, int] = {}
        self.results: dict[str, list[Result]] = {}
        """Every answer to a command, by request id."""
        self.ends: dict[str, str] = {}
        self.freed = "0-0"
        self.weights: dict[tuple[str, str], list[Drop]] = {}
        self.versions: dict[tuple[str, int], str] = {}
        """What is deleted, and not forgotten: weights, and versions of adapters."""
        self.bytes = (0, 1000)
        self.answers_until_killed: int | None = None
        """After so many answers, the process that answers next is killed, and its answer is lost."""

    def append(self, model_id: str, command: Command) -> str:
        """Returns the request id."""
        number = self._numbers.get(model_id, 0)
        self._numbers[model_id] = number + 1
        position = f"{len(self._commands) + 9}-0"  # the second one has more digits than the first
        logged = LoggedCommand(position, model_id, number, decode_command(encode(command)))
        self._commands.append(logged)
        return logged.request_id

    def last(self, request_id: str) -> Result:
        return self.results[request_id][-1]

    @property
    def kept(self) -> list[LoggedCommand]:
        """The commands that are not freed."""
        return [each for each in self._commands if _key(each.position) > _key(self.freed)]

    def read(self, after: str, count: int, block_s: float) -> Sequence[LoggedCommand]:
        return [each for each in self.kept if _key(each.position) > _key(after)][:count]

    def answer(self, command: LoggedCommand, result: Result) -> None:
        if self.answers_until_killed is not None:
            if not self.answers_until_killed:
                raise Killed
            self.answers_until_killed -= 1
        self.results.setdefault(command.request_id, []).append(decode_answer(encode(Answer(result))).result)

    def answered(self, request_ids: Sequence[str]) -> Sequence[bool]:
        return [each in self.results for each in request_ids]

    def free(self, position: str) -> None:
        self.freed = max(self.freed, position, key=_key)

    def held_bytes(self) -> tuple[int, int]:
        return self.bytes

    def ended(self, model_ids: Collection[str]) -> Mapping[str, str]:
        return {model_id: why for model_id, why in self.ends.items() if model_id in model_ids}

    def drop(self, model_id: str, name: str, request_id: str) -> None:
        """Delete the weights that this command has saved, after the last command."""
        (saved,) = (each.position for each in self._commands if each.request_id == request_id)
        self.weights.setdefault((model_id, name), []).append(Drop(saved, self._commands[-1].position))

    def dropped(self) -> Dropped:
        return Dropped({member: list(drops) for member, drops in self.weights.items()}, dict(self.versions))

    def forget_weights(self, model_id: str, name: str, deleted: str) -> None:
        drops = self.weights.pop((model_id, name))
        if left := [each for each in drops if _key(each.deleted) > _key(deleted)]:
            self.weights[model_id, name] = left

    def forget_adapter(self, policy: str, version: int) -> None:
        del self.versions[policy, version]


def _key(position: str) -> int:
    return int(position.split("-")[0])
