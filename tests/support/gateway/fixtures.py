"""Fixtures: a gateway on a real port, in front of a fake engine, on a real Redis."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from tokenizers import Tokenizer

from gateway.edge.calls import CallKey, InFlightCall, InFlightCalls
from gateway.language.tokenizer_files import tokenizer_of
from tests.support.gateway.deployment import Deploy, Deployment, ready
from tests.support.gateway.gated_engine import ANSWER, GatedEngine
from tests.support.gateway.processes import Processes
from tests.support.gateway.retry_counts import RetryCounts
from tests.support.gateway.running import Backends, RunningGateway, backends_in
from tests.support.gateway.scripted_trainer import ScriptedTrainer, scripted_trainer
from tests.support.rollout_server.in_process import server_thread
from tests.support.rollout_server.weights import write_model
from tests.support.serving import free_port
from tests.support.tiny_vision_model import make_tiny_vision_model
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

SHARED_POLL_S = 0.5
"""How often a gateway polls that lives for many tests: as often as a user's."""


@pytest.fixture(scope="session")
def backends(redis_url: str, tiny_model: Path, tokenizer: Tokenizer) -> Iterator[Backends]:
    with backends_in(1, redis_url, tiny_model, tokenizer) as backends:
        yield backends


@pytest.fixture(scope="module")
def own_backends(redis_url: str, tiny_model: Path, tokenizer: Tokenizer) -> Iterator[Backends]:
    """The same in a database where no gateway of another module drives pushes."""
    with backends_in(3, redis_url, tiny_model, tokenizer) as backends:
        yield backends


@pytest.fixture
def deploy(own_backends: Backends, tmp_path: Path) -> Iterator[Deploy]:
    """Starts rollout servers and a gateway, in this process, with these settings."""
    own_backends.clear(None)
    write_model(tmp_path / "model")
    shutil.copy(own_backends.model_path / "tokenizer.json", tmp_path)
    with ExitStack() as started:

        def deploy(
            count: int,
            *,
            gateway: RunningGateway | None = None,
            locations: str = "",
            lora: dict[str, Any] | None = None,
            first: int = 0,
            memory: str = "exclusive",
            server: dict[str, Any] | None = None,
            **settings: Any,
        ) -> Deployment:
            if gateway is None:
                gateway = started.enter_context(
                    own_backends.gateway(
                        **{"engines": [], "engine_wait_s": 5.0, "poll_every_s": 0.2} | settings
                    )
                )
            made = Deployment(gateway, tmp_path, own_backends.redis_url)
            for index in range(first, first + count):
                given = {
                    "id": f"r{index}",
                    "port": free_port(),
                    "engine_port": free_port(),
                    "model_path": tmp_path / "model",
                    "gateway_url": gateway.url,
                    "register_every_s": 0.5,
                    "weights_dir": tmp_path / "weights",
                    "policies_dir": tmp_path / "policies",
                    "memory": memory,
                    **(server or {}),
                } | ({"locations": f"{tmp_path},{locations}"} if locations else {})
                given |= {"lora": lora} if lora else {}
                made.servers.append(started.enter_context(server_thread(tmp_path, given)))
            wait_until(lambda: ready(gateway) == first + count)
            # A server that is ready tells its version a moment later.
            wait_until(lambda: made.plan()["admissible"])
            return made

        yield deploy


@pytest.fixture(scope="session")
def gateway_url(backends: Backends) -> Iterator[tuple[str, bytes]]:
    """A gateway that calls an engine without a rollout server, and its secret."""
    backends.clear(None)
    with backends.gateway_url(poll_every_s=SHARED_POLL_S) as url:
        yield url, backends.secret()


@pytest.fixture
def gateway(backends: Backends, gateway_url: tuple[str, bytes]) -> Iterator[RunningGateway]:
    with backends.shared(*gateway_url) as gateway:
        yield gateway


@pytest.fixture
def other(gateway: RunningGateway, backends: Backends) -> Iterator[RunningGateway]:
    """Another gateway on the same Redis."""
    with backends.ready_gateway() as other:
        yield other


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="session")
def tokens(vision_model: Path) -> Tokenizer:
    return tokenizer_of(vision_model)


@pytest.fixture(scope="session")
def pad(tokens: Tokenizer) -> int:
    return tokens.get_vocab()["<|image_pad|>"]


@pytest.fixture(scope="module")
def seeing_url(backends: Backends, vision_model: Path) -> Iterator[tuple[str, bytes]]:
    """A gateway whose model sees, and its secret."""
    backends.clear(None)
    limits = {"max_images": 3, "max_bytes": 100_000, "max_pixels": 300 * 300}
    more: Any = {"poll_every_s": SHARED_POLL_S, "engine_wait_s": 60.0}
    with backends.gateway_url(model_path=vision_model, images=limits, **more) as url:
        yield url, backends.secret()


@pytest.fixture
def seeing(backends: Backends, seeing_url: tuple[str, bytes], tokens: Tokenizer) -> Iterator[RunningGateway]:
    with backends.shared(*seeing_url) as gateway:
        gateway.engine.tokenizer = tokens
        yield gateway


@pytest.fixture
def trainer(gateway: RunningGateway) -> Iterator[ScriptedTrainer]:
    """A trainer by commands, which trains nothing."""
    with scripted_trainer(gateway.redis) as running:
        yield running


@pytest.fixture
def retry_counts(monkeypatch: pytest.MonkeyPatch) -> RetryCounts:
    seen, join, leave = RetryCounts(), InFlightCalls.join, InFlightCall.leave

    def joined(calls: InFlightCalls, key: CallKey, attempt: int) -> InFlightCall | None:
        call = join(calls, key, attempt)
        if call is not None:
            seen.calls.append(ref(call))
        return call

    def left(call: InFlightCall) -> None:
        leave(call)
        seen.left += not call.ended

    monkeypatch.setattr(InFlightCalls, "join", joined)
    monkeypatch.setattr(InFlightCall, "leave", left)
    return seen


@pytest.fixture
def timed(backends: Backends, turned: TurnedClock) -> Iterator[RunningGateway]:
    """A gateway on the clock that the test turns."""
    backends.clear(None)
    with backends.gateway() as gateway:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        yield gateway


@pytest.fixture
def gated(gateway: RunningGateway, backends: Backends) -> RunningGateway:
    """A gateway whose engine stops after three tokens of its answer."""
    return _gated(gateway, backends)


@pytest.fixture
def gated_timed(timed: RunningGateway, backends: Backends) -> RunningGateway:
    """`gated` on the clock that the test turns."""
    return _gated(timed, backends)


def _gated(gateway: RunningGateway, backends: Backends) -> RunningGateway:
    backends.engine = gateway.engine = GatedEngine(backends.tokenizer, stall_after=3)
    gateway.engine.script.extend(list(ANSWER) for _ in range(20))
    return gateway


@pytest.fixture(scope="module")
def processes(
    redis_url: str, tiny_model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    with backends_in(4, redis_url, tiny_model, tokenizer) as backends:
        yield Processes(backends, tmp_path_factory.mktemp("gateways"))
