"""What a fleet asks, without sockets: registrations as in Redis, and the status of simulated engines."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from bench.simulated_fleet.engines import SimulatedEngine
from gateway.engines.fleet_server import Registration
from rollout_queue.protocol.status import ServerStatus
from rollout_queue.redis import keys


def url_of(engine_id: str) -> str:
    return f"http://{engine_id}"


class Registry:
    """Redis, as far as a fleet reads its registrations there."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[bytes, bytes]] = {keys.SERVERS: {}}
        self.values: dict[str, bytes] = {keys.SERVING: b"1"}
        self.operations: Counter[str] = Counter()
        self.bytes_read = 0
        self._asked: list[Any] = []

    def add(self, engine: SimulatedEngine, now: float) -> None:
        url = url_of(engine.id)
        registration = Registration(id=engine.id, url=url, engine_url=url, registered_at=now)
        self.hashes[keys.SERVERS][engine.id.encode()] = msgspec.json.encode(registration)

    def remove(self, engine_id: str) -> None:
        self.hashes[keys.SERVERS].pop(engine_id.encode(), None)

    def pipeline(self, *, transaction: bool) -> "Registry":
        assert not transaction  # noqa: S101 - the fleet reads without one
        return self

    async def __aenter__(self) -> "Registry":
        self._asked = []
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def hgetall(self, key: str) -> None:
        found = self.hashes.get(key, {})
        self.bytes_read += sum(len(field) + len(value) for field, value in found.items())
        self._answer("hgetall", dict(found))

    def get(self, key: str) -> None:
        self._answer("get", self.values.get(key))

    def smembers(self, _: str) -> None:
        self._answer("smembers", set())

    async def execute(self) -> list[Any]:
        answered, self._asked = self._asked, []
        return answered

    async def hdel(self, key: str, field: str) -> int:
        return int(self.hashes[key].pop(field.encode(), None) is not None)

    def _answer(self, name: str, found: Any) -> None:
        self.operations[name] += 1
        self._asked.append(found)


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

    async def close(self) -> None:
        return None
