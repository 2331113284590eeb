"""The part of an operating-system process that `Engine` needs."""

import logging
from typing import Protocol

from rollout_queue.machine_memory import ending

logger = logging.getLogger(__name__)


class ProcessHandle(Protocol):
    """One run of the engine."""

    @property
    def exited(self) -> bool: ...
    async def wait(self) -> int: ...
    async def kill(self) -> None: ...
    async def stop(self) -> None: ...
    def log_tail(self) -> str: ...
    def note_memory(self) -> None: ...


async def how_it_ended(process: ProcessHandle) -> str:
    """How the engine's process ended, in words. The end of its log, which tells why, is logged before."""
    logger.warning("the end of the engine's log:\n%s", process.log_tail())
    return ending(await process.wait())
