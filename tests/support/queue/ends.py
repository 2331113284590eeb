"""Both ends of one stream, in memory or on Redis."""

from typing import Any

from redis import Redis

from rollout_queue.contract.stream import StreamReader, StreamWriter


class Ends:
    """Both ends of one stream."""

    def __init__(self, writer: StreamWriter, reader: StreamReader, redis: Redis | None = None) -> None:
        self.writer, self.reader, self.redis = writer, reader, redis

    def read(self) -> list[Any]:
        return [entry.record for entry in self.reader.read(100, 0.01)]
