"""What a fleet asks, without sockets: registrations as in Redis, and the status of simulated engines."""

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from bench.simulated_fleet.engines import SimulatedEngine
from gateway.fleet.fleet_server import Registration
from rollout_queue.contract.serving_plan import Admissible, ServingPlan
from rollout_queue.protocol.gateway_messages import ServerStatus
from rollout_queue.redis import key_names


def url_of(engine_id: str) -> str:
    return f"http://{engine_id}"


class Registry:
    """Redis, as far as a fleet reads its registrations there."""

    def __init__(self) -> None:
        self._servers: dict[bytes, bytes] = {}
        self.loading: set[bytes] = set()
        """The servers that a push has load a version."""
        self.serve(1)
        self.operations = 0
        self.bytes_read = 0
        self._changes = 0

    def add(self, engine: SimulatedEngine, now: float) -> None:
        url = url_of(engine.id)
        registration = Registration(id=engine.id, url=url, engine_url=url, registered_at=now)
        self._servers[engine.id.encode()] = msgspec.json.encode(registration)
        self._changes += 1

    def serve(self, *versions: int) -> None:
        """Admit these versions, the newest first."""
        admissible = tuple(Admissible(version, 0) for version in versions)
        self._plan = msgspec.json.encode(ServingPlan(admissible=admissible))

    def pipeline(self, *, transaction: bool) -> "RegistryPipeline":
        assert not transaction  # noqa: S101 - the fleet reads without one
        return RegistryPipeline(self)

    async def hgetall(self, _: str) -> dict[bytes, bytes]:
        found = dict(self._servers)
        self.operations += 1
        self.bytes_read += sum(len(field) + len(value) for field, value in found.items())
        return found

    async def zrange(self, *_: object, **__: object) -> list[bytes]:
        """No request is suspected of killing engines."""
        self.operations += 1
        return []

    def answer(self, name: str, key: str) -> Any:
        """The answer to a command of a pipeline."""
        self.operations += 1
        found: Any = set(self.loading) if key == key_names.LOADING else set()
        if name == "exists":
            return 1
        if name == "get":
            found = self._plan if key == key_names.SERVING else str(self._changes).encode()
        self.bytes_read += len(found) if isinstance(found, bytes) else sum(map(len, found))
        return found


class RegistryPipeline:
    """Commands that are answered together."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._asked: list[tuple[str, str]] = []

    async def __aenter__(self) -> "RegistryPipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def get(self, key: str) -> None:
        self._asked.append(("get", key))

    def smembers(self, key: str) -> None:
        self._asked.append(("smembers", key))

    def exists(self, key: str) -> None:
        self._asked.append(("exists", key))

    async def execute(self) -> list[Any]:
        return [self._registry.answer(name, key) for name, key in self._asked]


class StatusOnly:
    """An engine client that knows only how to ask for a status."""

    def __init__(self, engines: Mapping[str, SimulatedEngine]) -> None:
        self._engines = engines
        self.polls = 0

    async def get(self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> bytes:
        del timeout_s, headers
        self.polls += 1
        engine = self._engines.get(url.removeprefix("http://").removesuffix("/status"))
        if engine is None or engine.state == "dead":
            raise aiohttp.ClientConnectionError("nothing listens there")
        status = ServerStatus(
            id=engine.id,
            state=engine.state,
            version=engine.version,
            running=len(engine.running),
            waiting=len(engine.waiting),
            kv_usage=engine.kv_usage,
        )
        return status.model_dump_json().encode()
