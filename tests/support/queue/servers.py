"""Redis as people run it, in processes: a server with any flags, and a master with replicas and sentinels."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tests.support.redis_process import POLICY, redis_executable
from tests.support.serving import free_port
from tests.support.waiting import PATIENCE_S, wait_until

MASTER = "mymaster"


class RedisServer:
    """A server with a configuration of its own, which Sentinel may rewrite."""

    def __init__(
        self, directory: Path, *flags: str, program: str | None = None, port: int | None = None
    ) -> None:
        """`flags` are lines of the configuration; they come after those of queue/redis.conf."""
        directory = directory.absolute()
        directory.mkdir(parents=True)
        self.directory, self.port = directory, port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._program = program or redis_executable()
        self._configuration = directory / "redis.conf"
        shutil.copy(POLICY, self._configuration)
        with self._configuration.open("a") as lines:
            lines.write("\n".join(["", f"port {self.port}", f"dir {directory}", *flags, ""]))
        self.client = Redis(port=self.port, socket_timeout=PATIENCE_S)

    def start(self, *arguments: str, client: Redis | None = None) -> "RedisServer":
        """`client` asks whether it has started, if a password or TLS is needed for that."""
        self.client = client or self.client
        with (self.directory / "redis.log").open("ab") as log:
            command = [self._program, str(self._configuration), *arguments]
            self.process = subprocess.Popen(command, stdout=log, cwd=self.directory)
        wait_until(self.answers)
        return self

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.directory / "redis.log").read_text()[-2000:]
        try:
            return bool(self.client.ping())
        except RedisError:
            return False

    def suspend(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=120)

    def close(self) -> None:
        self.kill()
        self.client.close()


class WatchedMaster:
    """A master, its replicas, and three sentinels that promote a replica when the master is gone."""

    def __init__(
        self, directory: Path, servers: int = 3, flags: Sequence[str] = (), sentinel_flags: Sequence[str] = ()
    ) -> None:
        quick = ("repl-diskless-sync yes", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1")
        self.servers = [
            RedisServer(directory / f"redis-{number}", *quick, *flags).start() for number in range(servers)
        ]
        for replica in self.servers[1:]:
            replica.client.replicaof("127.0.0.1", str(self.servers[0].port))
        watched = [
            f"sentinel monitor {MASTER} 127.0.0.1 {self.servers[0].port} 2",
            f"sentinel down-after-milliseconds {MASTER} 1000",
            f"sentinel failover-timeout {MASTER} 4000",
            f"sentinel parallel-syncs {MASTER} 4",
            *sentinel_flags,
        ]
        self.sentinels = [Sentinel(directory / f"sentinel-{number}", watched).start() for number in range(3)]
        self.url = "redis+sentinel://" + ",".join(each.address for each in self.sentinels) + f"/{MASTER}/0"
        wait_until(lambda: self.complete(servers - 1))

    def complete(self, replicas: int) -> bool:
        """Whether every sentinel sees one master with all its replicas, and the other sentinels."""
        return all(each.sees(replicas) for each in self.sentinels) and self._in_step(replicas)

    def _in_step(self, replicas: int) -> bool:
        """Whether all replicas have what the master has."""
        found: Any = self.master.client.info("replication")
        offset = found["master_repl_offset"]
        lines = [found.get(f"slave{number}", {}) for number in range(replicas)]
        return all(each.get("state") == "online" and each["offset"] >= offset - 1000 for each in lines)

    @property
    def master(self) -> RedisServer:
        address = self.sentinels[0].master_port()
        return next(each for each in self.servers if each.port == address)

    @property
    def replicas(self) -> list[RedisServer]:
        return [each for each in self.servers if each.port != self.master.port]

    def fail_over(self, former: RedisServer, *, by_itself: bool = False) -> None:
        """Wait until the sentinels have promoted a replica; then start the former master again, as a replica.
        If that is to happen `by_itself`, it starts as a master, and Sentinel demotes it after 10 s."""
        self.until_another(former)
        former.start(*(() if by_itself else ("--replicaof", "127.0.0.1", str(self.master.port))))
        wait_until(lambda: self.complete(len(self.servers) - 1))

    def until_another(self, former: RedisServer) -> None:
        """Wait until all sentinels name another master."""
        wait_until(lambda: all(each.master_port() != former.port for each in self.sentinels))

    def close(self) -> None:
        for sentinel in self.sentinels:
            sentinel.close()
        for server in self.servers:
            server.close()


class Sentinel:
    """One sentinel, with a configuration that it rewrites."""

    def __init__(self, directory: Path, lines: Sequence[str]) -> None:
        directory.mkdir(parents=True)
        self._directory, self.port = directory, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._configuration = directory / "sentinel.conf"
        fixed = [f"port {self.port}", f"dir {directory}", "bind 127.0.0.1"]
        self._configuration.write_text("\n".join([*fixed, *lines, ""]))
        self._client: Any = Redis(port=self.port, socket_timeout=PATIENCE_S)

    def start(self) -> "Sentinel":
        command = [redis_executable(), str(self._configuration), "--sentinel"]
        with (self._directory / "sentinel.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, env=os.environ)
        wait_until(self._answers)
        return self

    def authenticate(self, password: str) -> None:
        self._client.close()
        self._client = Redis(port=self.port, socket_timeout=PATIENCE_S, password=password)

    def _answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except RedisError as error:
            return "AUTH" in str(error).upper()

    def master_port(self) -> int:
        """What clients ask for. While a failover runs, it is the former master."""
        return int(self._client.sentinel_masters()[MASTER]["port"])

    def sees(self, replicas: int) -> bool:
        state = self._client.sentinel_masters()[MASTER]
        there = state["num-slaves"] >= replicas and state["num-other-sentinels"] == 2
        down = [
            each
            for each in self._client.sentinel_slaves(MASTER)
            if each["is_sdown"] or each["is_disconnected"]
        ]
        return bool(there and not down and not state["is_sdown"] and not state["is_odown"])

    def promote_another(self) -> None:
        """Start a failover although the master is well."""
        self._client.execute_command("SENTINEL FAILOVER", MASTER)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=120)
        self._client.close()
