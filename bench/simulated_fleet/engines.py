"""One engine, simulated: its queue, its batch, its key-value cache with the prefixes of sessions.

queue ──room in the batch and the cache──▶ prefill (one after the other) ──▶ decode ──▶ prefix stays cached
                                              ▲                                │
                                              └── retracted: the cache is full ┘
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from gateway.fleet.fleet_server import Registration
from rollout_queue.contract.serving_plan import Admissible, ServingPlan
from rollout_queue.protocol.gateway_messages import ServerStatus
from rollout_queue.redis import key_names


@dataclass(frozen=True)
class EngineModel:
    """What an engine can do. About a model of 8 billion parameters on a GPU of 80 GB."""

    kv_tokens: int = 400_000
    """Tokens that the cache holds."""
    max_running: int = 256
    prefill_per_s: float = 25_000.0
    """Tokens a second."""
    step_s: float = 0.012
    """A decoding step of a batch of one…"""
    step_per_call_s: float = 0.00008
    """…and what each further call adds."""
    expected_share: float = 0.5
    """The share of the tokens to sample for which a call needs room to be admitted."""


@dataclass(eq=False)
class EngineCall:
    """One call at the engine. Sizes in tokens."""

    prefix: str
    """Whose tokens the prompt begins with."""
    prompt: int
    output: int
    most_output: int
    done: asyncio.Future[None]
    held: int = 0
    """Tokens of the cache that it has, beside those of the cached prefix that it uses."""
    epoch: int = 0
    """How often it was retracted."""


@dataclass
class EngineSeen:
    """What the engine did. In tokens, except the last."""

    prompted: int = 0
    cached: int = 0
    prefilled: int = 0
    """Tokens that were computed, those again that a retraction lost."""
    sampled: int = 0
    retractions: int = 0


@dataclass(eq=False)
class SimulatedEngine:
    """Serves calls in simulated time."""

    id: str
    model: EngineModel = field(default_factory=EngineModel)
    version: int = 1
    state: str = "ready"
    process: str = ""
    """Names the rollout server's process in its status."""
    seen: EngineSeen = field(default_factory=EngineSeen)

    def __post_init__(self) -> None:
        self.waiting: deque[EngineCall] = deque()
        self.running: dict[EngineCall, None] = {}
        self._cached: OrderedDict[str, int] = OrderedDict()
        """Tokens by prefix, without a call that uses them; the oldest first."""
        self._cached_tokens = self._held = 0
        self._prefilled_at = 0.0
        self._handles: set[asyncio.TimerHandle] = set()

    @property
    def kv_usage(self) -> float:
        """The share of the cache that running calls have."""
        return min(1.0, self._held / self.model.kv_tokens)

    @property
    def held(self) -> int:
        return self._held

    def caches(self, prefix: str) -> int:
        """How many tokens of the prefix it has."""
        return self._cached.get(prefix, 0)

    async def serve(self, call: EngineCall) -> None:
        """Returns when the call has its answer. Raises ConnectionError when the engine dies."""
        self.seen.prompted += call.prompt
        self.waiting.append(call)
        self._admit()
        await call.done

    def load(self, version: int) -> None:
        """Serve another version. No prefix of the one before is of use."""
        self.version, self.state = version, "ready"
        self._cached.clear()
        self._cached_tokens = 0
        self._admit()

    def die(self) -> None:
        """End all calls."""
        self.state = "dead"
        ended, self.running = [*self.running, *self.waiting], {}
        self.waiting.clear()
        for handle in self._handles:
            handle.cancel()
        self._cached.clear()
        self._cached_tokens = self._held = 0
        for call in ended:
            if not call.done.done():
                call.done.set_exception(ConnectionError(self.id))

    def _admit(self) -> None:
        model = self.model
        while self.waiting and self.state == "ready" and len(self.running) < model.max_running:
            call = self.waiting[0]
            needs = call.prompt + int(model.expected_share * call.most_output)
            if self.running and self._held + needs > model.kv_tokens:
                return
            self.waiting.popleft()
            self._begin(call)

    def _begin(self, call: EngineCall) -> None:
        loop, model = asyncio.get_running_loop(), self.model
        hit = min(self._cached.get(call.prefix, 0), call.prompt)
        if hit:
            self._cached.move_to_end(call.prefix)
        if not call.epoch:
            self.seen.cached += hit
        fresh = call.prompt - hit
        self.seen.prefilled += fresh
        self._hold(call, fresh)
        self.running[call] = None
        self._prefilled_at = max(self._prefilled_at, loop.time()) + fresh / model.prefill_per_s
        step_s = model.step_s + model.step_per_call_s * len(self.running)
        whole_s = self._prefilled_at - loop.time() + call.output * step_s
        self._later(whole_s * 0.7, self._grow, call, call.epoch)
        self._later(whole_s, self._finish, call, call.epoch)

    def _grow(self, call: EngineCall, epoch: int) -> None:
        """Its tokens take room; if there is none, the newest calls lose theirs."""
        if call in self.running and call.epoch == epoch:
            self._hold(call, call.held + call.output)
            while self._held > self.model.kv_tokens and len(self.running) > 1:
                self._retract(next(reversed(self.running)))

    def _retract(self, call: EngineCall) -> None:
        self.seen.retractions += 1
        self._release(call)
        call.epoch += 1
        self.waiting.appendleft(call)

    def _finish(self, call: EngineCall, epoch: int) -> None:
        if call not in self.running or call.epoch != epoch:
            return
        self._release(call)
        self.seen.sampled += call.output
        self._keep(call.prefix, call.prompt + call.output)
        if not call.done.done():
            call.done.set_result(None)
        self._admit()

    def _hold(self, call: EngineCall, tokens: int) -> None:
        self._held += tokens - call.held
        call.held = tokens
        self._evict()

    def _release(self, call: EngineCall) -> None:
        del self.running[call]
        self._held -= call.held
        call.held = 0

    def _keep(self, prefix: str, tokens: int) -> None:
        self._cached_tokens += tokens - self._cached.pop(prefix, 0)
        self._cached[prefix] = tokens
        self._evict()

    def _evict(self) -> None:
        while self._cached and self._cached_tokens + self._held > self.model.kv_tokens:
            self._cached_tokens -= self._cached.popitem(last=False)[1]

    def _later(self, seconds: float, work: Any, *arguments: Any) -> None:
        loop = asyncio.get_running_loop()

        def run() -> None:
            self._handles.discard(handle)
            work(*arguments)

        handle = loop.call_later(seconds, run)
        self._handles.add(handle)


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
        if name in ("exists", "sismember"):
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

    def sismember(self, key: str, _: str) -> None:
        self._asked.append(("sismember", key))

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
