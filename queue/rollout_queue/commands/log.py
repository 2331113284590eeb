"""The trainer's end of the command log.

client ─▶ gateway ── in order, once ─▶ log ── read ─▶ trainer ── answer ─▶ the client's poll
                                        ▲ └─ after a crash, it reads again from its checkpoint on
                                        └─ free: what a durable checkpoint contains is removed
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from rollout_queue.commands.command import LoggedCommand
from rollout_queue.commands.result import Result

BEGINNING = "0-0"
"""The position before the first command."""


WHOLE_MODEL = "*"
"""The name in the note of a model that is gone: the log frees its commands, and nothing of it stays."""


class Drop(NamedTuple):
    """Weights were deleted: what was saved up to the place `saved` is gone for commands after `deleted`."""

    saved: str
    deleted: str


class Dropped(NamedTuple):
    """What was deleted, and has files still, perhaps."""

    weights: Mapping[tuple[str, str], Sequence[Drop]]
    """By model and name (`weights/{name}`, `sampler_weights/{name}`, `external_weights/{name}`,
    WHOLE_MODEL), in the order of their deletion."""
    adapters: Mapping[tuple[str, int], str]
    """Versions of adapters that nobody can name: adapter and version → the place of the command that made
    it."""


class CommandReader(Protocol):
    """Every method raises StorageUnavailable, and LeaseLost if another trainer has claimed the lease."""

    def read(self, after: str, count: int, block_s: float) -> Sequence[LoggedCommand]:
        """Up to `count` commands after this position, in order. Waits up to `block_s` for the first. A
        command that cannot be decoded comes as `Refused`."""
        ...

    def answer(self, command: LoggedCommand, result: Result) -> None:
        """Store the result, and wake those who wait for it. Storing the same again changes nothing."""
        ...

    def answered(self, request_ids: Sequence[str]) -> Sequence[bool]:
        """Which of these commands have a result."""
        ...

    def free(self, position: str) -> None:
        """Remove the commands up to this position, which a durable checkpoint contains."""
        ...

    def held_bytes(self) -> tuple[int, int]:
        """The bytes of all commands in the log, and the most that it may hold. The closer they are, the
        sooner a checkpoint is due."""
        ...

    def ended(self, model_ids: Collection[str]) -> Mapping[str, str]:
        """Those of these models that no new command can reach, and why: their memory can be freed. A model
        that has ended once has ended for ever, also when its records are gone."""
        ...

    def dropped(self) -> Dropped:
        """The weights that were deleted, before or after the commands that were read last."""
        ...

    def forget_weights(self, model_id: str, name: str, deleted: str) -> None:
        """Forget the deletions of these weights up to this place: their files are gone, and no replay begins
        before it."""
        ...

    def forget_adapter(self, policy: str, version: int) -> None:
        """Forget a version of an adapter: its files are gone."""
        ...
