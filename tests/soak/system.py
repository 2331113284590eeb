"""What a soak runs: a Redis, gateways and engines, each in a process of its own on loopback."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from gateway.language.tokenizer_files import tokenizer_of
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import ADMIN_KEY, Backends
from tests.support.redis_process import RedisProcess
from tests.support.serving import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
GATEWAYS, ENGINES = 2, 3
STARTS_WITHIN_S = 400.0
SILENCE_S = 3.0
"""The gateways' timeout for clients that send or read nothing. It is shorter than the default, so that a soak
has many such timeouts."""
CONTEXT_LENGTH = 65_536


class Engine:
    """An engine's process, which can be killed, suspended, and started again at its address."""

    def __init__(self, tokenizer: Path) -> None:
        self._port, self._tokenizer = free_port(), tokenizer
        self.url = f"http://127.0.0.1:{self._port}"
        self.killed_at = list[float]()
        """When the soak killed it, in seconds since the epoch."""
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.soak.engine", str(self._port), str(self._tokenizer)]
        self._process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.killed_at.append(time.time())
        self._process.kill()
        self._process.wait()

    @property
    def dead(self) -> bool:
        return self._process.poll() is not None

    def suspend(self) -> None:
        """Make the process hang. The kernel still accepts connections and bytes for it."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/model_info", timeout=120).status_code == 200
        except httpx.TransportError:
            return False


@dataclass(frozen=True)
class SoakSystem:
    """The running processes."""

    redis_url: str
    gateways: Sequence[str]
    """Their URLs."""
    processes: Sequence[psutil.Process]
    """The gateways' processes, in the same order."""
    engines: Sequence[Engine]

    def servers(self) -> list[dict[str, Any]]:
        """The engines as each gateway sees them."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        found: list[dict[str, Any]] = []
        for url in self.gateways:
            reply = httpx.get(f"{url}/admin/rollout_servers", headers=headers, timeout=60)
            found += reply.raise_for_status().json()["data"]
        return found

    def warnings(self) -> list[list[str]]:
        """What each gateway warns of."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        found = [httpx.get(f"{url}/admin/status", headers=headers, timeout=60) for url in self.gateways]
        return [each.raise_for_status().json()["warnings"] for each in found]

    def well(self) -> bool:
        """Whether every gateway sends calls to every engine. A half-open breaker lets the next call pass."""
        return all(each["state"] == "ready" and each["breaker"] != "open" for each in self.servers())

    def failures(self) -> Counter[str]:
        """How many calls the gateways answered with each status of 500 or more."""
        found = Counter[str]()
        for url in self.gateways:
            text = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == "weir_http_responses_total" and sample.labels["status"] >= "500":
                        found[sample.labels["status"]] += int(sample.value)
        return found

    def calm(self) -> bool:
        """Whether no gateway has an answer in flight."""
        return not any(each["in_flight"] for each in self.servers())


@contextmanager
def soak_system(run_dir: Path, model_path: Path) -> Iterator[SoakSystem]:
    file = model_path / "tokenizer.json"
    redis, engines, started = RedisProcess(run_dir / "redis"), list[Engine](), list[subprocess.Popen[bytes]]()
    try:
        redis.start(maxmemory="2gb")
        engines += [Engine(file) for _ in range(ENGINES)]
        for engine in engines:
            wait_until(engine.answers, STARTS_WITHIN_S)
        tokenizer = tokenizer_of(model_path)
        urls = ",".join(engine.url for engine in engines)
        backends = Backends(redis.url, model_path, tokenizer, redis.client, FakeEngine(tokenizer), urls)
        gateways, made = [], Processes(backends, run_dir)
        for _ in range(GATEWAYS):
            process, url = made.start(
                context_length=CONTEXT_LENGTH,
                connections__body_timeout_s=SILENCE_S,
                connections__write_timeout_s=SILENCE_S,
            )
            started.append(process)
            gateways.append(url)
        for url in gateways:
            made.at(url).http.close()
        yield SoakSystem(redis.url, gateways, [psutil.Process(each.pid) for each in started], engines)
    finally:
        for process in started:
            process.kill()
            process.wait()
        for engine in engines:
            engine.kill()
        redis.close()
