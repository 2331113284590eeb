"""A trainer of two ranks on two hosts, with Redis and a gateway on the first host's loopback."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from redis.exceptions import RedisError

from tests.support.redis_clients import redis_at
from tests.support.redis_process import redis_executable
from tests.support.serving import serving
from tests.support.trainer_service.harness import FakeGateway
from tests.support.trainer_service.hosts import Host, two_hosts
from tests.support.trainer_service.over_http import over_http
from tests.support.trainer_service.redis_agents import RedisAgents
from tests.support.waiting import wait_until

STARTS_WITHIN_S = 400.0
REDIS_PORT, GATEWAY_PORT, TRAINER_PORT = 6379, 8000, 8200


@dataclass(frozen=True)
class HostPair:
    """The hosts, and what surrounds the trainer."""

    folder: Path
    hosts: tuple[Host, Host]
    gateway: FakeGateway
    agents: RedisAgents

    @property
    def words(self) -> list[str]:
        """The trainer's arguments."""
        return ["--config", str(self.folder / "weir.yaml")]

    @property
    def checkpoints(self) -> Path:
        """A directory that both hosts share, as they share all others."""
        return self.folder / "checkpoints"

    def configure(self, model_path: Path, **settings: Any) -> None:
        """Write weir.yaml."""
        trainer: dict[str, Any] = {
            "model_path": str(model_path),
            "redis_url": f"redis://127.0.0.1:{REDIS_PORT}/0",
            "gateway_url": f"http://127.0.0.1:{GATEWAY_PORT}",
            "checkpoint_dir": str(self.checkpoints),
            "policies_dir": str(self.folder / "policies"),
            "metrics_path": None,
            "port": TRAINER_PORT,
            "threads": 1,
            "device": "cpu",
            "lease_s": 2.0,
            "retry_s": 0.1,
            # The trainer may read a group while it is written.
            "algorithm": {"min_live_rows": 2, "group_wait_s": 1e12, "flush_after_s": None},
            # The logprobs of these agents are invented, so that these guards would always alarm.
            "guards": {"max_abs_logp": None, "max_kl": None},
        }
        (self.folder / "weir.yaml").write_text(yaml.safe_dump({"trainer": trainer | settings}))

    def ranks(self) -> list[psutil.Process]:
        """The ranks on the first host, and then those on the second."""
        return [rank for host in self.hosts for rank in host.ranks()]

    def train(self, launchers: "Launchers") -> None:
        """Have the ranks train the next step, and wait until the gateway hears of its version."""
        last = max(self.gateway.versions)
        self.agents.group(f"after-{last}", [1.0, 0.0])
        wait_until(lambda: max(self.gateway.versions) > last or launchers.ended(), STARTS_WITHIN_S)
        assert max(self.gateway.versions) > last, f"the launchers ended with {launchers.ended()}"
        assert [len(host.ranks()) for host in self.hosts] == [1, 1]

    def saved_step(self) -> int:
        """The step of the checkpoint from which a restart continues."""
        return int((self.checkpoints / "CURRENT").read_text(encoding="utf-8").rpartition("-")[2])


@dataclass(frozen=True)
class Launchers:
    """The processes that have started the ranks."""

    processes: "Sequence[subprocess.Popen[str]]"

    def ended(self) -> list[int]:
        """The statuses of those that have ended."""
        return [process.returncode for process in self.processes if process.poll() is not None]

    def wait(self, timeout_s: float) -> list[int]:
        """Their statuses, when all have ended."""
        return [process.wait(timeout_s) for process in self.processes]


def kill_tree(process: "subprocess.Popen[Any]") -> None:
    """Kill what the process has started, and then the process, unless it has ended."""
    if process.poll() is None:
        for below in psutil.Process(process.pid).children(recursive=True):
            below.kill()
        process.kill()


@contextmanager
def launched(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], log: Path
) -> Iterator[Launchers]:
    """Inside the context the launchers run. What they and the ranks print is added to `log`. The end of the
    hosts ends what is left of them."""
    path = os.pathsep.join(path for path in sys.path if path)
    common = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with log.open("a", encoding="utf-8") as output, ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(command, env=common | own, stdout=output, stderr=output, text=True)
            )
            for command, own in zip(commands, environments, strict=True)
        ]
        try:
            yield Launchers(started)
        except AssertionError:
            print(log.read_text(encoding="utf-8"))
            raise
        finally:
            for process in started:
                kill_tree(process)


@contextmanager
def host_pair(folder: Path) -> Iterator[HostPair]:
    """Inside the context, Redis and the gateway wait for a trainer."""
    gateway = FakeGateway()
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(folder))
        short = stack.enter_context(tempfile.TemporaryDirectory())  # names of sockets are short
        where = f"unix://{short}/redis"
        options = {"--port": str(REDIS_PORT), "--bind": "127.0.0.1", "--unixsocket": f"{short}/redis"}
        words = [word for option in options.items() for word in option]
        command = hosts[0].enter(redis_executable(), *words, "--save", "", "--dir", short)
        redis = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(kill_tree, redis)
        wait_until(answers(where))
        listener = stack.enter_context(hosts[0].listen(GATEWAY_PORT))
        stack.enter_context(serving(over_http(gateway), listener=listener))
        yield HostPair(folder, hosts, gateway, RedisAgents(where))


def answers(url: str) -> Callable[[], bool]:
    """Whether this Redis answers."""

    def ask() -> bool:
        try:
            with redis_at(url) as client:
                return bool(client.ping())
        except RedisError:
            return False

    return ask
