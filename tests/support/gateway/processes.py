"""Gateways in their own processes, on one Redis and one fake engine."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.serving import free_port
from tests.support.waiting import wait_until

STARTS_WITHIN_S = 300.0
"""A process loads Python and the model's tokenizer first, and the machine may be busy."""


@dataclass
class Processes:
    """Starts gateways on a Redis database and an engine that no other test uses."""

    backends: Backends
    logs: Path
    _number: Iterator[int] = field(default_factory=itertools.count)

    def start(self, **settings: object) -> tuple[subprocess.Popen[bytes], str]:
        """Start a gateway. A nested setting is named as in a variable: `connections__per_address`. Without a
        setting `engines`, it has the bare engine; without a `port`, any free one."""
        port = settings.pop("port", None) or free_port()
        environment = os.environ | {
            "WEIR_REDIS_URL": self.backends.redis_url,
            "WEIR_MODEL_PATH": str(self.backends.model_path),
            "WEIR_ENGINES": str(settings.pop("engines", self.backends.engine_url)),
            "WEIR_CLIENT_KEYS": CLIENT_KEY,
            "WEIR_ADMIN_KEYS": ADMIN_KEY,
            "WEIR_GATEWAY__PORT": str(port),
            "WEIR_GATEWAY__LEAVE_S": "0",
            **{f"WEIR_GATEWAY__{name.upper()}": str(value) for name, value in settings.items()},
        }
        with (self.logs / f"gateway-{next(self._number)}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-m", "gateway"], env=environment, stderr=log)
        return process, f"http://127.0.0.1:{port}"

    def at(self, url: str) -> RunningGateway:
        """Wait until the gateway at this address is ready."""
        gateway = RunningGateway(url, self.backends.engine, self.backends.redis)
        wait_until(lambda: ready(gateway), STARTS_WITHIN_S)
        return gateway

    @contextmanager
    def gateway(self, **settings: object) -> Iterator[tuple[subprocess.Popen[bytes], RunningGateway]]:
        """Start a gateway for one test, which may stop or kill it."""
        process, url = self.start(**settings)
        try:
            gateway = self.at(url)
            yield process, gateway
            gateway.http.close()
        finally:
            process.kill()
            process.wait()


def ready(gateway: RunningGateway) -> bool:
    try:
        return bool(gateway.get("/ready").status_code == 200)
    except httpx.TransportError:
        return False
