"""The system of docker-compose.yml, with several gateways and rollout servers.

Its containers are killed as by a crash.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.kubernetes.docker import docker

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "rollout_server", "trainer_service", "redis", "proxy")
BOOT_S = 1800.0
"""How long all containers may take to be healthy: the demo's model is trained, and the engines boot."""
HEALS_WITHIN_S = 600.0
POLL_S = 1.0


@dataclass(frozen=True)
class Container:
    """One container that runs."""

    name: str
    service: str
    pid: int
    healthy: bool

    def kill(self) -> None:
        """End the container's first process. Docker's own `kill` would not be followed by a restart."""
        os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class ComposeSystem:
    """A compose project that is up."""

    project: str
    port: int
    keys: dict[str, str]
    """By role: the keys that its first start made."""

    @property
    def url(self) -> str:
        """The proxy's address for http."""
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *arguments: str, input: str | None = None, timeout_s: float = BOOT_S) -> str:  # noqa: A002
        """Run a command of compose for this project. Raises CalledProcessError."""
        return compose(self.project, self.port, *arguments, input=input, timeout_s=timeout_s)

    def containers(self) -> list[Container]:
        """The containers of the services that run all the time."""
        ids = docker("ps", "-q", "--filter", f"label=com.docker.compose.project={self.project}").split()
        found = json.loads(docker("inspect", *ids)) if ids else []
        every = [_container(each) for each in found]
        return sorted((each for each in every if each.service in SERVICES), key=lambda each: each.name)

    def admin(self, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.keys['admin']}"}
        reply = httpx.get(f"{self.url}{path}", headers=headers, timeout=30)
        return reply.raise_for_status().json()

    def heal(self, count: int, killed: Container) -> float:
        """Wait until the killed container runs again, so many are healthy, and every rollout server is ready.
        Returns the seconds it took."""
        began = time.monotonic()
        within(HEALS_WITHIN_S, lambda: killed.pid not in {each.pid for each in self.containers()})
        within(HEALS_WITHIN_S, lambda: self._well(count))
        return time.monotonic() - began

    def _well(self, count: int) -> bool:
        if sum(each.healthy for each in self.containers()) < count:
            return False
        try:
            servers = self.admin("/admin/status")["rollout_servers"]
        except (httpx.HTTPError, ValueError):
            return False
        return {each["state"] for each in servers} == {"ready"}


@contextmanager
def compose_system(project: str, port: int, gateways: int, rollout_servers: int) -> Iterator[ComposeSystem]:
    """Start a project whose images are there already, and remove all of it at the end."""
    scale = ("--scale", f"gateway={gateways}", "--scale", f"rollout_server={rollout_servers}")
    try:
        compose(project, port, "up", "-d", "--wait", "--no-build", *scale, timeout_s=BOOT_S)
        run = ("exec", "-T", "trainer_service", "cat")
        keys = {role: compose(project, port, *run, f"/run/weir/{role}_keys") for role in ("client", "admin")}
        yield ComposeSystem(project, port, keys)
    finally:
        compose(project, port, "down", "--volumes", "--remove-orphans", timeout_s=300)


def compose(project: str, port: int, *arguments: str, input: str | None = None, timeout_s: float = 60) -> str:  # noqa: A002
    """The output of `docker compose`. Raises CalledProcessError."""
    command = ["docker", "compose", "-p", project, *arguments]
    environment = os.environ | {"WEIR_PORT": str(port), "WEIR_TLS_PORT": str(port + 1)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        input=input,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def within(limit_s: float, holds: Callable[[], bool]) -> None:
    """Wait until it holds. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:.0f} s")
        time.sleep(POLL_S)  # before the next look


def _container(found: dict[str, Any]) -> Container:
    state = found["State"]
    return Container(
        name=found["Name"].lstrip("/"),
        service=found["Config"]["Labels"]["com.docker.compose.service"],
        pid=state["Pid"],
        healthy=state.get("Health", {}).get("Status") == "healthy",
    )
