"""One rollout server of the fleet, as this gateway sees it: state, version, load, limit, circuit breaker.

The breaker: after failures a server gets no calls for a growing time, then one trial call.

closed ──failures──▶ open ──time──▶ half-open ──a trial succeeds──▶ closed
                      ▲                 └────────a trial fails──┐
                      └─────────────────────────────────────────┘

The limit is how many calls a server may have at once, from what its engine reports. It grows while no call
waits in the engine and its key-value cache has room, and shrinks when calls wait or the cache fills up. An
engine whose cache is full retracts calls: it computes their tokens again later.
"""

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

import msgspec

from gateway.errors import EngineFault
from gateway.fleet.answer import PartialAnswer
from gateway.fleet.generate_request import Adapter, AllowedVersions
from gateway.settings import ConcurrencySettings
from rollout_queue import clock
from rollout_queue.protocol.gateway_messages import NO_SIGN_OF_LIFE, ServerShape
from rollout_queue.protocol.rollout_server_messages import AdapterShape

Life = Literal["process", "scheduler"]
"""The part of an engine that gives a sign of life (`silence.py`)."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a server. `url` is the rollout server's; a bare engine (see `fleet.py`) has none."""

    id: str
    engine_url: str
    url: str | None = None
    registered_at: float = 0.0
    process: str | None = None
    """The `process` in the server's `/status`; None for a server that an operator registered."""
    displaced: tuple[str, ...] = ()
    """The processes that had this id or URL before. If one registers again, it is a second server."""
    forget_after_s: float | None = None

    def renews(self, known: "Registration | None") -> bool:
        """Whether the same process registers the same addresses again."""
        return (
            known is not None
            and known.process is not None
            and (self.process, self.url, self.engine_url) == (known.process, known.url, known.engine_url)
        )


class ModelInfo(msgspec.Struct, frozen=True):
    """The part of a bare engine's `/model_info` that the fleet needs."""

    weight_version: str = "0"


@dataclass(frozen=True)
class EngineLoad:
    """What an engine reports of its load; the calls are those of all gateways."""

    running: int
    waiting: int
    kv_usage: float | None = None
    """The share of its key-value cache that running calls have; None if it does not say."""

    @property
    def calls(self) -> int:
        return self.running + self.waiting


FAILURES = 3
"""Consecutive failures that open the breaker. A single one may come from a broken connection."""
FIRST_S, LONGEST_S = 0.5, 10.0
"""How long the breaker stays open: at first, and at most."""


@dataclass
class Breaker:
    """The state of the breaker, from the results of this gateway's calls to the server."""

    failures: int = 0
    openings: int = 0
    """How often the breaker has opened since the last success; each time it stays open twice as long."""
    open_until: float = 0.0
    """clock.monotonic(); 0 while the breaker is closed."""
    trial: bool = False
    """A trial call is in flight."""
    unreachable: bool = False
    """The last failure was that no connection could be made. `placement.py` never chooses such a server while
    its breaker is open."""

    @property
    def state(self) -> Literal["closed", "half_open", "open"]:
        if not self.open_until:
            return "closed"
        return "open" if clock.monotonic() < self.open_until else "half_open"

    @property
    def allows_call(self) -> bool:
        return not self.open_until or (self.state == "half_open" and not self.trial)

    def enter(self) -> bool:
        """A call begins. Returns whether it is the trial; the trial must call `leave` at its end."""
        self.trial = self.trial or self.state == "half_open"
        return self.trial

    def leave(self) -> None:
        """The trial ended; if it neither succeeded nor failed, the next call is the trial."""
        self.trial = False

    def succeeded(self) -> None:
        self.failures = self.openings = 0
        self.open_until, self.trial, self.unreachable = 0.0, False, False

    def failed(self, *, unreachable: bool) -> None:
        """A call failed. A server that is `unreachable` opens the breaker at once."""
        state, self.trial, self.unreachable = self.state, False, unreachable
        self.failures += 1
        # When a server fails, its calls in flight fail together. They open the breaker only once.
        if state == "half_open" or (state == "closed" and (unreachable or self.failures >= FAILURES)):
            length_s = min(FIRST_S * 2.0**self.openings, LONGEST_S)
            self.openings += 1
            self.open_until = clock.monotonic() + length_s * random.uniform(0.75, 1.25)

    def try_soon(self) -> None:
        """Permit a trial now: the server's status says that it is ready again."""
        if self.open_until:
            self.open_until = min(self.open_until, clock.monotonic())


class EngineWait:
    """`with wait:` around each await of one engine's bytes, in the task that made the object.

    `end` makes the block raise the fault. Between two blocks, `end` has no effect until the next one begins.
    So it never interrupts the delivery of tokens that have arrived.
    """

    def __init__(self, answer: PartialAnswer) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a call is always served by a task
        self._task = task
        self._answer = answer
        self.waiting = self._cancelled = False
        """While it is false, `end` has no effect: tokens are delivered."""
        self._cancelling = task.cancelling()
        self.fault: EngineFault | None = None
        """Why the engine was given up."""

    @property
    def allowed(self) -> AllowedVersions:
        """Which policy versions may continue the answer."""
        return self._answer.allowed

    @property
    def movable(self) -> bool:
        """Whether another engine can continue the answer."""
        return self._answer.resumable

    def end(self, fault: EngineFault) -> None:
        """Give the engine up."""
        if self.fault is None:
            self.fault = fault
            if self.waiting:
                self._cancelled = self._task.cancel()

    def __enter__(self) -> None:
        if self.fault is not None:
            raise self.fault
        self.waiting = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting = False
        if not self._cancelled:
            return
        self._cancelled = False
        # As in asyncio.timeout: if others cancelled the task as well, it stays cancelled.
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError and self.fault:
            raise self.fault from error


@dataclass
class FleetServer:
    """One server of the fleet, as this gateway sees it."""

    registration: Registration
    state: str = "unknown"
    """unknown, or what `/status` says: starting, loading, ready, draining or dead."""
    version: int | None = None
    manifest_sha256: str | None = None
    """The digest of the version's manifest; None for the version that the engine started with."""
    push: int = 0
    """The push in which it has proved its version; 0 if no push brought that."""
    ahead: bool = False
    """It has proved its version in a push that Redis has lost: its version answers calls until the next
    push."""
    adapters: Mapping[tuple[str | None, int], str | None] = field(default_factory=dict)
    """What its engine has as adapters: by policy (None for the fleet's) and version, the adapter's name
    there; None for its weights alone."""
    reloads: int = 0
    """How often it has loaded a version that this gateway pushed."""
    drained: bool = False
    """An operator took it out of rotation: it gets no new calls."""
    seen_at: float = 0.0
    """When it last answered; seconds since the epoch, 0 for never."""
    error: str | None = "not asked yet"
    """Why the last status request failed; None if it succeeded."""
    has_tokenizer: bool = True
    """False once its engine refused a stop string because it has no tokenizer (`--skip-tokenizer-init`)."""
    in_flight: int = 0
    promised: int = 0
    """Calls that waited for a server, and are about to enter this one (`call_queue.py`)."""
    others: int = 0
    """Calls of other gateways, as its engine reported them last."""
    engine_load: EngineLoad | None = None
    """What its engine reported last; None if it does not report its load."""
    limit: int | None = None
    """How many calls it may have at once, from all gateways; None for no limit."""
    freed: Callable[["FleetServer"], None] | None = None
    """Called when a call has left it."""
    pushing: bool = False
    """This gateway is pushing a policy to it: calls wait there while it loads the policy."""
    breaker: Breaker = field(default_factory=Breaker)
    watched: bool = False
    """A gateway has it load a version, so that its state changes soon."""
    asked_at: float = 0.0
    """clock.monotonic() when it was asked last."""
    late: int = 0
    """Consecutive status requests that timed out."""
    status_request: asyncio.Task[None] | None = None
    waits: set[EngineWait] = field(default_factory=set)
    """The calls that wait for the engine's bytes."""
    signs: dict[Life, float] = field(default_factory=lambda: {"process": 0.0, "scheduler": 0.0})
    """By `clock.monotonic()`: the engine's last signs of life (`silence.py`), or the beginning of a wait."""
    missed: dict[Life, float] = field(default_factory=lambda: {"process": -math.inf, "scheduler": -math.inf})
    """When one of these signs was last missing for so long that the engine was suspected."""
    silent: set[Life] = field(default_factory=set)
    """Its answers have moved, because it did not give these signs of life. It has not given them since."""

    def __post_init__(self) -> None:
        self.id = self.registration.id

    def __str__(self) -> str:
        state = "silent" if self.silent else self.state
        return f"{self.id} is {state} at version {self.version}, its breaker {self.breaker.state}"

    @property
    def shown_state(self) -> str:
        """The state that operators are shown."""
        return "draining" if self.drained else self.state

    @property
    def live(self) -> bool:
        """It can load a policy: it answers, it is not drained, and its engine runs."""
        return self.state in ("ready", "loading") and not self.drained

    @property
    def load(self) -> int:
        """How many calls it has, from all gateways."""
        return self.in_flight + self.promised + self.others

    @property
    def has_room(self) -> bool:
        """Whether it may have one more call."""
        return self.limit is None or self.load < self.limit

    def reports(self, load: EngineLoad | None) -> None:
        """Its engine says how many calls it has."""
        self.engine_load = load
        self.others = 0 if load is None else max(0, load.calls - self.in_flight)

    def has_loaded(
        self, version: int, manifest_sha256: str | None, adapters: Iterable[AdapterShape], push: int
    ) -> None:
        """It has loaded a version that this gateway pushed to it, and goes on."""
        self.state = "ready" if self.state == "loading" else self.state
        self.serves_now(version, manifest_sha256, adapters, push)
        self.reloads += 1

    def serves_now(
        self,
        version: int | None,
        manifest_sha256: str | None,
        adapters: Iterable[AdapterShape],
        push: int | None,
    ) -> None:
        """It says what it serves."""
        self.version, self.manifest_sha256, self.push = version, manifest_sha256, push or 0
        self.adapters = {(adapter.policy, adapter.version): adapter.name for adapter in adapters}

    def can_answer(self, version: int, policy: str | None = None) -> bool:
        """Whether its engine has the version of the fleet's policy, or of the adapter with this name."""
        return (policy is None and version == self.version) or (policy, version) in self.adapters

    def adapter_of(self, version: int | None, policy: str | None = None) -> Adapter | None:
        """The adapter with which it answers a call for the version; None if its weights alone do. Without a
        version, that is the one that it serves."""
        version = self.version if version is None else version
        name = None if version is None else self.adapters.get((policy, version))
        return None if version is None or name is None else Adapter(name, version)

    @property
    def loads(self) -> bool:
        """It loads weights: calls wait there meanwhile."""
        return self.pushing or self.state == "loading"

    @property
    def steady(self) -> bool:
        """Nothing says that its state changes soon."""
        well = self.state == "ready" and self.error is None and self.breaker.state == "closed"
        return well and not (self.silent or self.pushing or self.watched)

    @property
    def able(self) -> bool:
        """It can work on a call now."""
        return self.state == "ready" and not self.pushing and self.breaker.allows_call

    @property
    def takes_calls(self) -> bool:
        """It is able, and neither an operator nor silence takes it out of rotation."""
        return self.able and not (self.drained or self.silent)

    def is_forgotten(self, now: float) -> bool:
        """Whether the fleet removes it: it is dead, and did not register for `forget_after_s`."""
        limit_s = self.registration.forget_after_s
        return (
            limit_s is not None and self.state == "dead" and now - self.registration.registered_at > limit_s
        )

    def enter(self) -> bool:
        """Count a call that begins. Returns whether it is the breaker's trial call, which `leave` needs."""
        self.in_flight += 1
        return self.breaker.enter()

    def leave(self, trial: bool) -> None:
        """Count a call that ended."""
        self.in_flight -= 1
        if trial:
            self.breaker.leave()
        if self.freed is not None:
            self.freed(self)

    def begin_wait(self, wait: EngineWait) -> None:
        """A call begins to wait for the engine's bytes; its end removes it from `waits`."""
        if not self.waits:
            self.gave_bytes(tokens=True)
        self.waits.add(wait)

    def gave_bytes(self, *, tokens: bool) -> None:
        """Its engine gave a sign of life; tokens are one of its scheduler's as well."""
        now = clock.monotonic()
        self.signs["process"] = now
        if tokens:
            self.signs["scheduler"] = now

    def give_up(self, why: str) -> None:
        """End every wait for the engine's bytes."""
        for wait in self.waits:
            wait.end(EngineFault("broken", why))

    def report(self) -> ServerShape:
        return ServerShape(
            id=self.id,
            url=self.registration.url,
            engine_url=self.registration.engine_url,
            state=self.shown_state,
            version=self.version,
            in_flight=self.in_flight,
            breaker=self.breaker.state,
            last_seen=self.seen_at or None,
            error=NO_SIGN_OF_LIFE if self.silent else self.error,
            load=self.load,
            limit=self.limit,
            kv_usage=None if self.engine_load is None else self.engine_load.kv_usage,
        )


BINDS = 0.9
"""A limit grows only if the engine has at least this share of it: else more room would not be used."""


def next_limit(limit: int | None, load: EngineLoad, settings: ConcurrencySettings) -> int | None:
    """The limit after one more report; `limit` is the one before. None: no limit.

    The cache fills up only while answers grow, so a report lags behind what the running calls will need. So
    the limit grows by the share of the target that is free, by less the nearer the target is, and never above
    the number of calls that would reach the target if each took as much as those that run do. It is cut only
    when the last cut has had its effect: when the engine has no more calls than the limit.
    """
    if not settings.adaptive or load.kv_usage is None:
        return None
    if limit is None:
        limit = max(settings.first, load.calls)
    if load.kv_usage > settings.kv_high:
        if load.calls <= limit:
            limit = math.floor(min(limit, load.running) * settings.shrink)
    elif load.waiting:
        if load.calls <= limit:
            limit = load.running
    elif load.kv_usage < settings.kv_target and load.running >= BINDS * limit:
        free = 1.0 - load.kv_usage / settings.kv_target
        grown = limit + max(1, math.floor(limit * free))
        reached = load.running * settings.kv_target / load.kv_usage if load.kv_usage else math.inf
        limit = max(limit, math.floor(min(grown, reached)))
    return max(settings.least, min(limit, settings.most))
