"""Bad days of a trainer that publishes, with real trainers, gateways and rollout servers, while calls go on.

After each, the four ends hold (`four_ends`). Files travel over HTTP, as changes where servers have the base.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from tokenizers import Tokenizer

from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.four_ends import ends_on, files_of
from tests.support.gateway.links import Link, link
from tests.support.gateway.push_system import PushSystem, ended, limit_files, push_system
from tests.support.gateway.running import ADMIN_KEY, Backends
from tests.support.rollout_server.weights_sampler import logprob_of_weights
from tests.support.serving import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

STARTS_WITHIN_S = 400.0
SHORT = 16_384
"""A limit in bytes: less than the size of any shard or export."""
TRIES = 10


@dataclass
class Training:
    """A system of rollout servers, and its trainer."""

    system: PushSystem
    link: Link
    """The path from the rollout servers to the trainer."""
    port: int
    stack: ExitStack
    trainer: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Start a trainer on the only checkpoint directory, and wait until it works."""
        self.trainer = self.process(self.port, ".")
        wait_until(lambda: self.status() is not None, STARTS_WITHIN_S)

    def process(self, port: int, name: str) -> subprocess.Popen[bytes]:
        """Start a trainer whose directories are in this one."""
        system, directory = self.system, self.system.directory / name
        settings = {
            "PORT": port,
            "CHECKPOINT_DIR": directory / "checkpoints",
            "POLICIES_DIR": directory / "policies",
            "PUBLISH_URL": f"{self.link.url}/weights",
            "GATEWAY_URL": system.gateway.url,
            "METRICS_PATH": directory / "metrics.jsonl",
            "TRANSPORT": "delta",
            "KEEP_POLICIES": 2,
            "THREADS": 1,
            "DEVICE": "cpu",
            "LEASE_S": 2,
            "RETRY_S": 0.2,
            "ALGORITHM__MASKS": "[]",
            "ALGORITHM__MIN_LIVE_ROWS": 2,
            "ALGORITHM__FLUSH_AFTER_S": 1,
            "GUARDS": '{"max_abs_logp": null, "max_kl": null}',
        }
        environment = os.environ | {f"WEIR_TRAINER__{name}": str(value) for name, value in settings.items()}
        environment |= {
            "WEIR_REDIS_URL": system.redis_url,
            "WEIR_MODEL_PATH": str(system.directory / "model"),
            "WEIR_ADMIN_KEYS": ADMIN_KEY,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        with (system.directory / "trainer.log").open("ab") as log:
            command = [sys.executable, "-m", "trainer_service"]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.stack.callback(ended, process)
        return process

    def status(self) -> Any:
        """What the trainer says; None if it does not answer."""
        try:
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            reply = httpx.get(f"http://127.0.0.1:{self.port}/status", headers=headers, timeout=120)
            return reply.json() if reply.status_code == 200 else None
        except httpx.TransportError:
            return None

    def train(self) -> int:
        """Play one group, which makes a step. Returns the newest version that the gateway knew before."""
        before, gateway = self.newest(), self.system.gateway
        for reward, session in enumerate(gateway.post("/groups", {"size": 2}).json()["sessions"]):
            path = f"/sessions/{session['session_id']}"
            assert gateway.chat(path=f"{path}/v1/chat/completions").status_code == 200
            ending = {"status": "completed", "reward": float(reward)}
            assert gateway.post(f"{path}/finish", ending).status_code == 200
        return before

    def newest(self) -> int:
        page = self.system.gateway.get("/admin/policies", key=ADMIN_KEY).json()
        return int(page["data"][-1]["version"])

    def train_and_serve(self) -> int:
        """Play one group, and wait until the fleet serves its version."""
        before = self.train()
        wait_until(lambda: self.newest() > before)
        wait_until(lambda: self.system.served(self.newest()))
        self.note_weights()
        return self.newest()

    def note_weights(self) -> None:
        """Note how the versions on the trainer's disk sample, before it removes them."""
        for path in (self.system.directory / "policies").glob("v*/STABLE"):
            version = int(path.parent.name[1:])
            weights = files_of(self.system.directory, version)
            self.system.sampled.setdefault(version, logprob_of_weights(weights))

    def check(self, seen: Any) -> None:
        self.note_weights()
        self.system.check(seen, self.newest())

    def stop_in_a_write(self) -> int:
        """Train, and suspend the trainer while it writes a version. Returns the newest one before it."""
        policies = self.system.directory / "policies"
        for _ in range(TRIES):
            before = self.train()
            while self.newest() == before:
                if not any(policies.glob("v*.tmp")):
                    time.sleep(0.001)  # the write is in another process, and is over soon
                    continue
                self.trainer.send_signal(signal.SIGSTOP)
                if any(policies.glob("v*.tmp")):
                    return before
                self.trainer.send_signal(signal.SIGCONT)
        raise AssertionError(f"no write was seen in {TRIES} steps")


@pytest.fixture(scope="module")
def running_training(
    tiny_model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Training]:
    port, backends = free_port(), Backends("", tiny_model, tokenizer, Redis(), FakeEngine(tokenizer))
    root = tmp_path_factory.mktemp("trainer-faults")
    with ExitStack() as stack:
        path = stack.enter_context(link(f"http://127.0.0.1:{port}"))
        system = stack.enter_context(
            push_system(root, backends, servers=2, source_url=path.url, max_version_lag=1)
        )
        training = Training(system, path, port, stack)
        training.start()
        yield training


@pytest.fixture
def training(running_training: Training) -> Iterator[Training]:
    yield running_training
    limit_files(running_training.trainer)
    running_training.link.mend()
    running_training.system.heal()


def test_a_full_disk_of_the_trainer_holds_the_version_until_there_is_room(training: Training) -> None:
    with training.system.traffic() as seen:
        training.train_and_serve()
        limit_files(training.trainer, SHORT)
        before = training.train()
        wait_until(lambda: "room on the disk" in training.status()["waiting_for"])
        assert training.newest() == before
        limit_files(training.trainer)
        wait_until(lambda: training.newest() > before)
        wait_until(lambda: training.system.served(training.newest()))
    training.check(seen)
    newest = training.system.gateway.get("/admin/policies", key=ADMIN_KEY).json()["data"][-1]
    files = files_of(training.system.directory, newest["version"])
    assert newest["size_bytes"] == sum(path.stat().st_size for path in files.iterdir())


def test_servers_without_a_path_to_the_trainer_go_on_when_they_have_one(training: Training) -> None:
    with training.system.traffic() as seen:
        training.link.cut()
        before = training.train()
        wait_until(lambda: training.newest() > before)
        training.system.newest = training.newest()
        training.system.server_in("preparing", "failed")
        training.link.mend()
        wait_until(lambda: training.system.served(training.newest()))
    training.check(seen)


def test_a_server_that_was_away_while_its_base_was_removed_fetches_the_whole_version(
    training: Training,
) -> None:
    with training.system.traffic() as seen:
        own = training.train_and_serve()
        training.system.servers[1].kill()
        for _ in range(3):
            training.train_and_serve()
        known = training.system.gateway.get("/admin/policies", key=ADMIN_KEY).json()["data"]
        assert own not in {policy["version"] for policy in known}, "its files are removed"
        training.system.replace_server(1)
        wait_until(lambda: ends_on(training.system, training.newest()))
        training.train_and_serve()
    training.check(seen)


def test_a_trainer_that_dies_after_the_announcement_is_not_needed_by_the_push(training: Training) -> None:
    training.system.control(load_s=1.5)
    with training.system.traffic() as seen:
        before = training.train()
        wait_until(lambda: training.newest() > before)
        training.system.newest = training.newest()
        training.system.server_in("loading")
        training.trainer.kill()
        wait_until(lambda: training.system.served(training.newest()))
        training.start()
        training.train_and_serve()
    training.check(seen)


def test_a_trainer_that_dies_in_a_write_publishes_the_version_when_it_is_back(training: Training) -> None:
    with training.system.traffic() as seen:
        before = training.stop_in_a_write()
        training.trainer.kill()
        training.start()
        wait_until(lambda: training.newest() > before)
        wait_until(lambda: training.system.served(training.newest()))
    training.check(seen)


def test_a_second_trainer_ends_and_the_first_one_goes_on_publishing(training: Training) -> None:
    with training.system.traffic() as seen:
        second = training.process(free_port(), "second")
        while second.poll() is None:
            training.train_and_serve()
        assert second.returncode == 1
        training.train_and_serve()
    training.check(seen)
    assert not any((training.system.directory / "second" / "policies").iterdir())
