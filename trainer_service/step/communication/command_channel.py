"""Broadcasts commands from rank 0 to all other ranks, over Gloo on the CPU, even if GPUs train."""

from datetime import timedelta
from typing import Generic, TypeVar

import torch

Command = TypeVar("Command")

COMMAND_TIMEOUT = timedelta(days=365)
"""The longest time between two commands. A trainer may wait for agents for days, but the process group that
trains has a timeout of minutes."""


class CommandChannel(Generic[Command]):
    """A process group for one thread of each rank. All ranks must make their channels in the same order."""

    def __init__(self, ranks: int) -> None:
        self._group = (
            torch.distributed.new_group(backend="gloo", timeout=COMMAND_TIMEOUT) if ranks > 1 else None
        )

    def send(self, command: Command | None) -> None:
        """Send a command. None tells the other ranks to end."""
        if self._group is not None:
            torch.distributed.broadcast_object_list([command], src=0, group=self._group)

    def receive(self) -> Command | None:
        """Wait for the next command. Raises RuntimeError if rank 0 is gone."""
        commands: list[Command | None] = [None]
        torch.distributed.broadcast_object_list(commands, src=0, group=self._group)
        return commands[0]

    def wait_for_all(self) -> None:
        """Wait until every rank has called this."""
        if self._group is not None:
            torch.distributed.barrier(group=self._group)

    def close(self) -> None:
        """Destroy all groups. A process that exits while Gloo's threads still run is aborted."""
        if self._group is not None:
            self.wait_for_all()
            torch.distributed.destroy_process_group()
