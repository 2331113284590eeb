"""Sentinels or nodes of a cluster that are down: one closes each connection, and one never says anything."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rollout_queue.redis.redis_client import open_async_redis
from rollout_queue.redis.settings import RedisSettings
from tests.support.waiting import PATIENCE_S


class DeadNodes:
    """Counts how often each of the two was asked."""

    def __init__(self) -> None:
        self._nodes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self._held = list[socket.socket]()
        self.asked = [0, 0]
        for number, node in enumerate(self._nodes):
            threading.Thread(target=self._accept, args=(number, node), daemon=True).start()

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{node.getsockname()[1]}" for node in self._nodes)

    def _accept(self, number: int, node: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = node.accept()
                self.asked[number] += 1
                if number == 0:
                    connection.close()
                else:
                    self._held.append(connection)

    def close(self) -> None:
        for each in (*self._nodes, *self._held):
            each.close()


@contextmanager
def down() -> Iterator[DeadNodes]:
    nodes = DeadNodes()
    yield nodes
    nodes.close()


async def pinged(settings: RedisSettings) -> bool:
    """Whether a client for asyncio gets an answer."""
    async with open_async_redis(settings, timeout_s=PATIENCE_S) as redis:
        return bool(await redis.ping())
