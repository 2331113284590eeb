"""Two gateways, two rollout servers with engine doubles, a Redis, all real processes, and their faults.

gateway 0 ── link ─▶ Redis ◀── gateway 1      r1 ── links ── both gateways      servers ── `Source` of files

Server r1 has links on each path to and from the gateways, so a test may cut it off.
"""

import asyncio
import itertools
import resource
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import psutil
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rollout_queue.contract.published_policy import FileSpec, TensorSpec, sha256_of
from rollout_queue.redis import key_names
from tests.support.gateway.deployment import Fleet, Traffic, live, traffic
from tests.support.gateway.four_ends import check_four_ends
from tests.support.gateway.links import Link, link
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.redis_process import RedisProcess
from tests.support.rollout_server.processes import ServerProcess, running
from tests.support.rollout_server.stub_engine import stub_interpreter
from tests.support.rollout_server.weights import WEIGHTS, float32_tensors, write_model, write_safetensors
from tests.support.serving import free_port, serving
from tests.support.waiting import wait_until
from trainer_service.storage.policy_store import PolicyStore

SHAPES = {"model.embed_tokens.weight": [4096, 8], "model.norm.weight": [8], "lm_head.weight": [4096, 8]}
SHORT = 65_536
"""A limit in bytes: less than a weights file, more than any other file of a server."""
CALLS_PER_S = 8.0
PUSH_TIMEOUT_S = 2.0
SERVERS = 2


class Source:
    """Serves the files of versions over HTTP, as a trainer does. A test may stop it within a file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.flowing = Event()
        self.flowing.set()

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{version}/{name}", self._file)])

    async def _file(self, request: Request) -> Response:
        version, name = request.path_params["version"], request.path_params["name"]
        start = int(request.headers.get("range", "bytes=0-")[6:-1])
        raw, weights = (self._directory / version / name).read_bytes()[start:], "safetensors" in name

        async def halves() -> AsyncIterator[bytes]:
            middle = len(raw) // 2
            yield raw[:middle]
            while weights and not self.flowing.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.02)  # until the test lets the second half flow
            yield raw[middle:]

        headers = {"content-length": str(len(raw))}
        return StreamingResponse(halves(), 206 if start else 200, headers)


@dataclass
class PushSystem(Fleet):
    """The running processes. `publish` numbers the versions; a test goes on where the last one has ended."""

    servers: list[ServerProcess] = field(default_factory=list)
    source: Source = field(kw_only=True)
    source_url: str = field(kw_only=True)
    processes: Processes = field(kw_only=True)
    stack: ExitStack = field(kw_only=True)
    redis_link: Link = field(kw_only=True)
    gateways: list[RunningGateway] = field(default_factory=list)
    gateway_processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    links: dict[str, Link] = field(default_factory=dict)
    """The paths of r1, by what they lead to: `server`, `engine` and `gateway`."""
    newest: int = 0
    _number: Iterator[int] = field(default_factory=itertools.count)

    # Versions

    def publish(self, *, wait: bool = False) -> int:
        """Write the next version, and announce it."""
        self.newest += 1
        self.write_files(self.newest)
        self.announce(self.newest, f"{self.source_url}/v{self.newest:08d}")
        if wait:
            wait_until(lambda: self.served(self.newest))
        return self.newest

    def write_files(self, version: int) -> Path:
        def weights(directory: Path) -> list[FileSpec]:
            path, few = directory / WEIGHTS, np.full(16, 1 + version, "<f4").tobytes()
            changed = {
                name: (dtype, shape, few[: len(raw)] + raw[len(few) :])
                for name, (dtype, shape, raw) in float32_tensors(1.0, SHAPES).items()
            }
            write_safetensors(path, changed)
            tensors = [TensorSpec(name, shape, "F32") for name, shape in SHAPES.items()]
            return [FileSpec(path.name, path.stat().st_size, sha256_of(path), tensors)]

        directory = self.directory / "policies"
        store = PolicyStore(directory, self.directory / "model", 1000, None)
        return store.write(version, version, weights)

    def served(self, version: int) -> bool:
        """Whether the push of the version has ended, and the fleet serves it."""
        plan = self.plan()
        return bool(plan["serving"] == version and plan["push"]["state"] == "serving")

    def result_of(self, index: int) -> dict[str, Any]:
        """What a server does, or did, in the newest push; empty before it takes part."""
        return dict(self.results(self.newest).get(f"r{index}", {}))

    def server_in(self, *states: str) -> int:
        """Wait until a server is in one of these states in the newest push; return its index. If a push ended
        while this process stood still, another one follows."""

        def found() -> list[str]:
            if self.served(self.newest):
                self.publish()
            results = self.results(self.newest)
            return [name for name in sorted(results) if results[name]["state"] in states]

        return int(wait_until(found)[0][1:])

    def gateway_versions(self) -> list[int]:
        return [version for each in self.gateways for version in each.server_versions().values()]

    # Traffic

    def traffic(self, *gateways: RunningGateway) -> Any:
        """Calls to these gateways; without any, to all."""
        name = f"day-{next(self._number)}"
        return traffic(*(gateways or self.gateways), per_s=CALLS_PER_S, name=name)

    def check(self, seen: Traffic, version: int | None = None) -> None:
        """Check the four ends; the fleet has to end on the newest version, or on this one."""
        check_four_ends(self, seen, self.newest if version is None else version)

    # Faults

    def leader(self) -> int:
        """The index of the gateway that drives pushes."""
        held: Any = wait_until(lambda: self.gateways[0].redis.get(key_names.PUSH_LEASE))
        pid = int(held.split(b"-")[0])
        return [process.pid for process in self.gateway_processes].index(pid)

    def until_led_by(self, index: int) -> None:
        wait_until(lambda: self.leader() == index)

    def replace_gateway(self, index: int) -> None:
        """Start a gateway in place of one that was killed, at the same address."""
        process = self.gateway_processes[index]
        process.wait()
        port = int(self.gateways[index].url.rsplit(":", 1)[1])
        self.gateway_processes[index] = self.start_gateway(index, port)

    def start_gateway(self, index: int, port: int) -> subprocess.Popen[bytes]:
        own = self.processes.backends
        url = own.redis_url if index else self.redis_link.url.replace("http:", "redis:") + "/0"
        processes = replace(self.processes, backends=replace(own, redis_url=url))
        process, _ = processes.start(
            engines="",
            port=port,
            push_timeout_s=PUSH_TIMEOUT_S,
            push_lease_s=1,
            poll_every_s=0.1,
            engine_wait_s=120,  # the machine may be busy
            max_unavailable=0.34,
            max_version_lag=4,
        )
        self.stack.callback(ended, process)
        gateway = RunningGateway(f"http://127.0.0.1:{port}", own.engine, own.redis)
        wait_until(lambda: live(gateway))
        return process

    def replace_server(self, index: int) -> None:
        """Start a rollout server in place of one that was killed, with the same id, ports and disk."""
        former = self.servers[index]
        former.kill()
        port = int(former.url.rsplit(":", 1)[1])
        self.servers[index] = self.start_server(index, port, former.engine_port)

    def start_server(self, index: int, port: int, engine_port: int) -> ServerProcess:
        settings: dict[str, Any] = {
            "id": f"r{index}",
            "port": port,
            "engine_port": engine_port,
            "engine_python": self.directory / "engine-python",
            "engine_device": "cpu",
            "model_path": self.directory / "model",
            "gateway_url": self.gateways[-1].url,
            "register_every_s": 0.5,
            "weights_dir": self.directory / "weights",
            "locations": f"{self.directory},{self.source_url}",
            "trainer_url": self.source_url,
            "fetch_timeout_s": 0.7,
            "restart_backoff_s": 0.1,
        }
        if index == 1:
            settings["gateway_url"] = self.links["gateway"].url
            settings["public_url"] = self.links["server"].url
            settings["engine_public_url"] = self.links["engine"].url
        server = self.stack.enter_context(running(self.directory, settings))
        self.stack.callback(server.kill)
        return server

    def engine_of(self, index: int) -> psutil.Process:
        """The process of a server's engine double."""
        (engine,) = psutil.Process(self.servers[index].process.pid).children()
        return engine

    def control(self, **faults: Any) -> None:
        """Set how all engines behave."""
        for server in self.servers:
            server.control(**faults)

    def cut_off(self, *, to: bool) -> None:
        """Drop what r1 sends to the gateways, and with `to` what they send to it, too."""
        for name in ("server", "engine"):
            self.links[name].cut(to=to)
        self.links["gateway"].cut(back=to)

    def heal(self) -> None:
        """End every fault that leaves the processes alive."""
        for each in (*self.links.values(), self.redis_link):
            each.mend()
        self.source.flowing.set()
        self.control()


def ended(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


def limit_files(process: subprocess.Popen[bytes], size: int = resource.RLIM_INFINITY) -> None:
    """Let a process write no file beyond this size: the write fails as on a full disk, with EFBIG. Needs no
    rights. Without a size, there is room again."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextmanager
def push_system(root: Path, backends: Backends) -> Iterator[PushSystem]:
    """`backends` gives the model whose tokenizer the gateways use. The servers have a smaller model."""
    write_model(root / "model", float32_tensors(1.0, SHAPES))
    shutil.copy(backends.model_path / "tokenizer.json", root)
    stub_interpreter(root)
    with ExitStack() as stack:
        redis = RedisProcess(root / "redis").start()
        stack.callback(redis.close)
        own = replace(backends, redis_url=redis.url, redis=redis.client)
        source = Source(root / "policies")
        ports = [free_port() for _ in range(2)]
        gateways = [RunningGateway(f"http://127.0.0.1:{port}", own.engine, own.redis) for port in ports]
        system = PushSystem(
            gateways[1],
            root,
            redis.url,
            source=source,
            source_url=stack.enter_context(serving(source.app())),
            processes=Processes(own, root),
            stack=stack,
            redis_link=stack.enter_context(link(f"http://127.0.0.1:{redis.port}")),
            gateways=gateways,
        )
        system.gateway_processes = [system.start_gateway(index, port) for index, port in enumerate(ports)]
        addresses = [(free_port(), free_port()) for _ in range(SERVERS)]
        targets = {"server": addresses[1][0], "engine": addresses[1][1], "gateway": ports[1]}
        for name, port in targets.items():
            system.links[name] = stack.enter_context(link(f"http://127.0.0.1:{port}"))
        for index, (port, engine_port) in enumerate(addresses):
            system.servers.append(system.start_server(index, port, engine_port))
        wait_until(lambda: all(ready_servers(gateway) == SERVERS for gateway in gateways))
        yield system


def ready_servers(gateway: RunningGateway) -> int:
    page: Any = gateway.get("/admin/rollout_servers", key=ADMIN_KEY).json()
    return sum(server["state"] == "ready" for server in page["data"])
