"""Real processes of Weir without SGLang: a Redis of their own, gateways on a fake engine, a trainer.

agents ─▶ gateway ─▶ fake engine (in the test)
             └─▶ Redis ─▶ trainer
"""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import libfaketime

from tests.support.gateway.gated_engine import NumberingEngine
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.redis_process import RedisProcess
from tests.support.serving import free_port, serving
from tests.support.waiting import wait_until
from weir.audit.audit import Report, audit
from weir.audit.audit_facts import ClientAnswer
from weir.audit.audit_sources import Sources

STARTS_WITHIN_S = 400.0
"""A process loads torch first, and the machine may be busy."""
ENDS_WITHIN_S = 120.0
"""The time that Kubernetes gives a process after SIGTERM by default."""
CLOCK = Path(libfaketime.__file__).parent / "vendor/libfaketime/src/libfaketime.so.1"


class Clock:
    """The wall clock of one process, which a test can move. The process's monotonic clock is unchanged.

    Each reading of the clock opens a file. For a process that reads the clock `often`, as a trainer does, the
    file is cached: such a process sees a jump within a second.
    """

    def __init__(self, file: Path, often: bool = False) -> None:
        self._file, self._often = file, often
        self.jump(0)

    def jump(self, seconds: float) -> None:
        """From now on, the clock differs by `seconds` from the true time."""
        aside = self._file.with_suffix(".new")
        aside.write_text(f"{seconds:+g}\n")
        aside.rename(self._file)

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "LD_PRELOAD": str(CLOCK),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            **({"FAKETIME_CACHE_DURATION": "1"} if self._often else {"FAKETIME_NO_CACHE": "1"}),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


class Service:
    """`python -m gateway` or `python -m trainer_service`."""

    def __init__(self, module: str, log: Path, environment: Mapping[str, str]) -> None:
        self.log, self.port = log, free_port()
        own = {f"WEIR_{module.removesuffix('_service').upper()}__PORT": str(self.port)}
        own["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module], env=os.environ | environment | own, stdout=file, stderr=file
            )
        self.url = f"http://127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def until(self, path: str, **expected: Any) -> dict[str, Any]:
        """Ask until the answer has the expected fields; return the answer."""
        said: dict[str, Any] = {}

        def so() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                headers = {"authorization": f"Bearer {ADMIN_KEY}"}
                reply = httpx.get(self.url + path, headers=headers, timeout=120)
                said.update(reply.json())
            except httpx.TransportError:
                return False
            return reply.status_code == 200 and all(said.get(k) == v for k, v in expected.items())

        wait_until(so, STARTS_WITHIN_S)
        return said

    def terminate(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=ENDS_WITHIN_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class LocalSystem:
    """The running processes and their files. `backends` holds the fake engine."""

    backends: Backends
    redis: RedisProcess
    root: Path
    stack: ExitStack
    _number: Any = field(default_factory=itertools.count)

    def gateway(self, clock: Clock | None = None, **settings: str) -> tuple[Service, RunningGateway]:
        """Start one more gateway and wait until it is ready; `settings` are named as in WEIR_GATEWAY__…"""
        service = self._service("gateway", clock, settings)
        service.until("/ready")
        gateway = RunningGateway(service.url, self.backends.engine, self.redis.client)
        self.stack.callback(gateway.http.close)
        return service, gateway

    def trainer(self, gateway: Service, clock: Clock | None = None, **settings: str) -> Service:
        """Start a trainer on the system's only checkpoint directory; it may not be ready yet."""
        given = {
            "CHECKPOINT_DIR": str(self.checkpoints),
            "POLICIES_DIR": str(self.root / "policies"),
            "GATEWAY_URL": gateway.url,
            "THREADS": "1",
            "DEVICE": "cpu",
            "LEASE_S": "3",
            "RETRY_S": "0.2",
            "METRICS_PATH": str(self.root / "metrics.jsonl"),
            "ALGORITHM__MASKS": "[]",
            "GUARDS": '{"max_abs_logp": null, "max_kl": null}',
        }
        return self._service("trainer_service", clock, given | settings)

    def clock(self, name: str, often: bool = False) -> Clock:
        return Clock(self.root / f"{name}.clock", often)

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def audit(self, heard: list[ClientAnswer], trainer: Service | None = None) -> Report:
        """Audit the system. If no trainer runs, the audit reads the files that a trainer left on disk."""
        self.checkpoints.mkdir(exist_ok=True)
        url = f"http://127.0.0.1:{free_port()}" if trainer is None else trainer.url
        return audit(Sources(self.redis.url, url, ADMIN_KEY, self.checkpoints), heard)

    def _service(self, module: str, clock: Clock | None, settings: Mapping[str, str]) -> Service:
        section = module.removesuffix("_service").upper()
        environment = {
            "WEIR_REDIS_URL": self.redis.url,
            "WEIR_MODEL_PATH": str(self.backends.model_path),
            "WEIR_ENGINES": self.backends.engine_url,
            "WEIR_CLIENT_KEYS": CLIENT_KEY,
            "WEIR_ADMIN_KEYS": ADMIN_KEY,
            **{f"WEIR_{section}__{name}": value for name, value in settings.items()},
            **(clock.environment if clock is not None else {}),
        }
        service = Service(module, self.root / f"{module}-{next(self._number)}.log", environment)
        self.stack.callback(service.close)
        return service


def open_local_system(backends: Backends, redis: RedisProcess, root: Path, stack: ExitStack) -> LocalSystem:
    """A system whose engine gives each answer its own number."""
    engine = NumberingEngine(backends.tokenizer)
    engine.numbers = itertools.count()
    backends.engine = engine
    backends.engine_url = stack.enter_context(serving(backends))
    return LocalSystem(backends, redis, root, stack)
