"""The trainer's end of the command log.

client ─▶ gateway ── in order, once ─▶ log ── read ─▶ trainer ── answer ─▶ the client's poll
                                        ▲ └─ after a crash, it reads again from its checkpoint on
                                        └─ free: what a durable checkpoint contains is removed
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollout_queue.commands.command import LoggedCommand
from rollout_queue.commands.result import Result

BEGINNING = "0-0"
"""The position before the first command."""


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

    def ended(self) -> Mapping[str, str]:
        """The models that no command can reach any more, and why: their memory can be freed."""
        ...
