"""The whole system on this machine, with two training ranks and a real engine; its parts can be killed."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from redis import Redis
from redis.exceptions import RedisError

from rollout_queue.contract.serving_plan import ServingPlan, plan_of
from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import open_redis
from rollout_queue.redis.settings import RedisSettings
from tests.crash.agents import Agents
from tests.support.queue.cluster import Cluster
from tests.support.serving import free_port
from tests.support.system.real_system import BOOTS_WITHIN_S, stack_settings
from weir.stack.service_process import Service, http_ready
from weir.stack.services import services_of
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

CLIENT_KEY, ADMIN_KEY = "crash-client", "crash-admin"
HEALS_WITHIN_S = BOOTS_WITHIN_S  # an engine that was killed boots again
SECOND, SECOND_GATEWAY = "second_rollout_server", "second_gateway"
DRIVER = "driving gateway"
NAMES = {"trainer": "trainer_service", "trainer rank 1": "trainer_service", "engine": "rollout_server"}
"""Some victims are children of a process that the stack starts. This names that process."""


@dataclass
class CrashSystem:
    """The running stack and its agents, as seen from outside."""

    stack: Stack
    settings: StackSettings
    redis: Redis
    redis_url: str = ""
    cluster: Cluster | None = None
    """The Redis that the services use, in place of the stack's own."""
    agents: Agents = field(init=False)
    asked: "Future[httpx.Response]" = field(default_factory=Future)
    """What became of the last request of `ask_trainer`."""

    @property
    def checkpoints(self) -> Path:
        return self.settings.run_dir / "checkpoints"

    @property
    def policies(self) -> Path:
        return self.settings.run_dir / "policies"

    def rollout_states(self) -> list[str]:
        """What each rollout server does."""
        return [self._rollout_state(name) for name in ("rollout_server", SECOND)]

    def _rollout_state(self, name: str) -> str:
        with suppress(httpx.HTTPError, ValueError, KeyError):
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            url = self.stack.processes[name].service.url
            return str(httpx.get(f"{url}/status", headers=headers, timeout=2).json()["state"])
        return "gone"

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the gateway, below `/admin/policies`. Raises httpx.HTTPError."""
        url = f"{self.stack.gateway_url}/admin/policies{path}"
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.request(method, url, json=body, headers=headers, timeout=120).raise_for_status().json()

    def trainer(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Ask the trainer. Raises httpx.HTTPError."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{self.stack.trainer_url}{path}"
        return httpx.request(method, url, json=body, headers=headers, timeout=120).raise_for_status()

    def ask_trainer(self, method: str, path: str, body: Any = None) -> None:
        """The same, on another thread; the answer comes into `asked`."""
        asked = self.asked = Future[httpx.Response]()

        def ask() -> None:
            try:
                asked.set_result(self.trainer(method, path, body))
            except httpx.HTTPError as error:
                asked.set_exception(error)

        threading.Thread(target=ask, name="operator", daemon=True).start()

    def plan(self) -> ServingPlan:
        """What the fleet serves, as it stands in Redis."""
        packed: bytes | None = self.redis.get(key_names.SERVING)  # type: ignore[assignment]
        return plan_of(packed)

    def driver(self) -> int | None:
        """The process of the gateway that drives pushes."""
        lease: bytes | None = self.redis.get(key_names.PUSH_LEASE)  # type: ignore[assignment]
        return None if lease is None else int(lease.split(b"-")[0])

    def process_of(self, victim: str) -> psutil.Process:
        """Raises LookupError if the victim has no process."""
        self.stack.check()  # notes the descendants, so that they are ended with their service
        if victim == DRIVER:
            return self._living_driver()
        if victim == "redis" and self.cluster is not None:
            return psutil.Process(self.cluster.owner.process.pid)
        parent = psutil.Process(self.stack.processes[NAMES.get(victim, victim)].pid)
        if victim in ("gateway", "redis", "rollout_server"):
            return parent
        for child in parent.children(recursive=True):
            with suppress(psutil.Error):
                if victim == "engine" and "sglang.launch_server" in child.cmdline():
                    return child
                if child.environ().get("RANK") == ("1" if victim == "trainer rank 1" else "0"):
                    return child
        raise LookupError(f"{victim} is not there")

    def _living_driver(self) -> psutil.Process:
        """Waits until a gateway drives pushes. The lease may still be that of one that was killed before."""
        deadline = time.monotonic() + HEALS_WITHIN_S
        while time.monotonic() < deadline:
            gateways = {self.stack.processes[name].pid for name in ("gateway", SECOND_GATEWAY)}
            if (pid := self.driver()) in gateways:
                return psutil.Process(pid)
            time.sleep(0.05)  # the lease expires
        raise LookupError("no gateway drives pushes")

    def heal(self, victim: str) -> float:
        """Restart the ended services, as a supervisor does; return the seconds until all is well."""
        began = time.monotonic()
        if victim == "redis" and self.cluster is not None:
            self.cluster.heal()
            return self._until_well(began, victim)
        name = self._driver_that_ended() if victim == DRIVER else NAMES.get(victim, victim)
        while victim != "engine" and self.stack.processes[name].exit_code is None:
            time.sleep(0.05)  # another process ends
            if time.monotonic() - began > HEALS_WITHIN_S:
                raise TimeoutError(f"{name} lives on after its part was killed")
        if victim != "engine":
            self.stack.restart(name)
        return self._until_well(began, victim)

    def recover(self, victim: str) -> float:
        """Wait until all is well after a part stood still, which may have ended because of it."""
        began = time.monotonic()
        while reason := self.unwell():
            for name, process in self.stack.processes.items():
                if process.exit_code is not None:
                    self.stack.restart(name)
            if time.monotonic() - began > HEALS_WITHIN_S:
                raise TimeoutError(f"not well {HEALS_WITHIN_S:g} s after {victim} stood still: {reason}")
            time.sleep(0.1)  # other processes go on
        return time.monotonic() - began

    def _until_well(self, began: float, victim: str) -> float:
        while reason := self.unwell():
            if time.monotonic() - began > HEALS_WITHIN_S:
                raise TimeoutError(f"not well {HEALS_WITHIN_S:g} s after {victim} was killed: {reason}")
            time.sleep(0.1)  # other processes start
        return time.monotonic() - began

    def _driver_that_ended(self) -> str:
        """Wait until the other gateway drives pushes. Returns the name of the one that was killed."""
        began = time.monotonic()
        while True:
            pids = {name: self.stack.processes[name].pid for name in ("gateway", SECOND_GATEWAY)}
            ended = [name for name in pids if self.stack.processes[name].exit_code is not None]
            if ended and self.driver() in {pid for name, pid in pids.items() if name not in ended}:
                return ended[0]
            if time.monotonic() - began > HEALS_WITHIN_S:
                raise TimeoutError("no other gateway took over the pushes")
            time.sleep(0.05)  # the lease of the killed gateway expires

    def unwell(self) -> str:
        """The reason why a part of the system does not work; empty when all is well."""
        if reason := self.stack.waiting_for():
            return reason
        for process in self.stack.processes.values():
            if reason := process.service.ready() or "":
                return f"{process.service.name}: {reason}"
        states = self.rollout_states()
        return "" if set(states) == {"ready"} else f"rollout servers: {', '.join(states)}"

    def serving(self) -> int | None:
        """The version that the fleet serves."""
        return self.plan().serving

    def quiet(self) -> bool:
        """Whether the trainer has read everything and holds nothing that it could train."""
        with suppress(RedisError, StopIteration, KeyError):
            groups = self.redis.xinfo_groups(key_names.STREAM)
            lag = next(group.get("lag") for group in groups if group["name"] == b"trainer")
            state = self.redis.hgetall(key_names.TRAINER)
            return lag in (0, None) and state[b"state"] == b"waiting"
        return False


def kill(process: psutil.Process) -> None:
    """Send SIGKILL and wait for the end of the process."""
    process.send_signal(signal.SIGKILL)
    with suppress(psutil.TimeoutExpired):
        process.wait(30)


def stand_still(process: psutil.Process, seconds: float) -> None:
    process.suspend()
    try:
        time.sleep(seconds)  # the machine stands still
    finally:
        process.resume()


def _with_second_ones(settings: StackSettings) -> list[Service]:
    """The services of the stack, one more rollout server (a canary needs two), and one more gateway: it takes
    over the pushes of the first one."""
    services = list(services_of(settings))
    (gateway,) = [service for service in services if service.name == "gateway"]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    services.append(
        replace(
            gateway,
            name=SECOND_GATEWAY,
            ports={port: "the second gateway"},
            url=url,
            ready=http_ready(url),
            environment=dict(gateway.environment) | {"WEIR_GATEWAY__PORT": str(port)},
        )
    )
    (first,) = [service for service in services if service.name == "rollout_server"]
    port, engine_port = free_port(), free_port()
    second = {
        "ID": SECOND,
        "PORT": str(port),
        "ENGINE_PORT": str(engine_port),
        "ENGINE_LOG": str(settings.logs_dir.absolute() / "second-engine.log"),
    }
    url = f"http://127.0.0.1:{port}"
    environment = dict(first.environment) | {
        f"WEIR_ROLLOUT_SERVER__{name}": value for name, value in second.items()
    }
    ports = {port: "the second server", engine_port: "the second engine"}
    added = replace(first, name=SECOND, ports=ports, url=url, ready=http_ready(url), environment=environment)
    return [*services, added]


@contextmanager
def crash_system(
    run_dir: Path, model_path: Path, engine_python: Path, redis: str = "single"
) -> Iterator[CrashSystem]:
    """`redis` is "single" or "cluster": six nodes, of which the master of the keys is killed. Its replica
    confirms each record."""
    cluster = Cluster(run_dir / "cluster") if redis == "cluster" else None
    elsewhere = {} if cluster is None else {"redis_url": cluster.url}
    confirmed = {} if cluster is None else {"redis_wait_replicas": 1, "redis_wait_timeout_s": 3.0}
    trainer_port = free_port()
    settings = stack_settings(
        run_dir,
        model_path,
        CLIENT_KEY,
        ADMIN_KEY,
        trainer_port=trainer_port,
        engine_python=engine_python,
        trainer_ranks=2,
        services={
            "gateway": {
                "canary": {"share": 0.5, "max_length_change": None, "max_reward_drop": None},
                **elsewhere,
                **confirmed,
            },
            "rollout_server": {"max_running_requests": 16, "max_total_tokens": 32768},
            "trainer": {
                **elsewhere,
                "threads": 1,
                "lease_s": 5,
                "publish_url": f"http://127.0.0.1:{trainer_port}/weights",
                "transport": "delta",
                "anchor_every": 3,
                "optimizer": {"lr": 1e-4},
                "algorithm": {
                    "min_live_rows": 4,
                    "max_tokens": 2048,
                    "max_staleness": 1000,
                    "flush_after_s": 2,
                },
            },
        },
    )
    held = nullcontext() if cluster is None else closing(cluster)
    with held, Stack(settings, _with_second_ones(settings)) as stack:
        stack.wait_ready(timeout_s=BOOTS_WITHIN_S)
        url = cluster.url if cluster is not None else settings.redis_url
        yield CrashSystem(stack, settings, open_redis(RedisSettings(redis_url=url), 30), url, cluster)
