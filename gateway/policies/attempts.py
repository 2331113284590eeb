"""What the driver of a push knows of one server: what it is told, how often it failed, and what runs."""

import asyncio
from dataclasses import dataclass

from gateway.policies.server_reload import PushOrder
from rollout_queue.contract.serving_plan import ServerPush

ATTEMPTS = 3
"""How often a server that fails, and does not refuse, is asked before the push ends without it."""


@dataclass
class Attempts:
    """What is known of one server about one order."""

    order: PushOrder
    process: str | None
    """The server's process: another one is asked anew."""
    noted: ServerPush
    failures: int = 0
    next_at: float = 0.0
    task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    def has_files_of(self, order: PushOrder) -> bool:
        """Whether the server has the files of an order, and has verified them."""
        own, asked = self.order.record, order.record
        same = own.version == asked.version and own.manifest_sha256 == asked.manifest_sha256
        return same and self.noted.state in ("prepared", "loading", "proved")

    @property
    def settled(self) -> bool:
        """Whether the push does not wait for this server any more."""
        if self.running:
            return False
        exhausted = self.noted.state == "failed" and self.failures >= ATTEMPTS
        return exhausted or self.noted.state in ("proved", "refused", "unavailable")
