"""A Redis for one test, with the queue's configuration and a data file that survives kills and power cuts."""

import os
import subprocess
from pathlib import Path

from redis.exceptions import RedisError

from tests.support.redis_clients import redis_at
from tests.support.serving import free_port
from tests.support.waiting import wait_until
from weir.stack.service_process import executable

POLICY = Path(__file__).parents[2] / "queue" / "redis.conf"


def redis_executable() -> str:
    """The program that WEIR_TEST_REDIS names; otherwise the one that `weir up` starts."""
    return os.environ.get("WEIR_TEST_REDIS") or executable()


class RedisProcess:
    """A `redis-server` that keeps its port and its directory when it is started again."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self._directory, self._environment = directory, environment
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis_at(self.url)

    def start(self, **flags: str) -> "RedisProcess":
        """Raises AssertionError when Redis does not start."""
        command = [redis_executable(), str(POLICY), "--port", str(self.port), "--dir", str(self._directory)]
        for name, value in flags.items():
            command += [f"--{name}", value]
        with (self._directory / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=self._environment or None, stdout=log)
        wait_until(self._started)
        return self

    def terminate(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=120)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has already ended."""
        self.process.kill()
        self.process.wait(timeout=120)

    def close(self) -> None:
        self.kill()
        self.client.close()

    @property
    def written(self) -> int:
        """The size in bytes of the data file, whose end a power cut removes."""
        return self._tail().stat().st_size

    def cut(self, to: int) -> None:
        """Keep the first `to` bytes of the file, as after a power cut. Redis must not be running."""
        assert self.process.poll() is not None
        with self._tail().open("r+b") as file:
            file.truncate(to)

    def _tail(self) -> Path:
        """The file that Redis appends to: a single file before Redis 7, the newest of a directory since."""
        parts = sorted(self._directory.rglob("appendonly.aof*.incr.aof"))
        return parts[-1] if parts else self._directory / "appendonly.aof"

    def _started(self) -> bool:
        assert self.process.poll() is None, (self._directory / "redis.log").read_text()[-2000:]
        return self._answers()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except RedisError:  # nobody listens yet, or the file is still read
            return False
