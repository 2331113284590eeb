"""A trainer and an engine on one device: the engine gives its memory away for each step, and only then."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Lock
from typing import Any

import httpx
import pytest
import torch

from tests.support.gateway.running import ADMIN_KEY
from tests.support.queue.memory_stream import MemoryStream
from tests.support.rollout_server.in_process import ServerThread, memory_sharing, server_thread
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.memory_server import MemoryServer
from tests.support.trainer_service.same_training import differs_by
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.heartbeat import Heartbeat, Stopped
from trainer_service.shared_state import SharedState
from trainer_service.step import device_memory
from trainer_service.step.device_memory import DeviceMemory, RolloutMemory
from trainer_service.step.group_trainer import Diverged

URL = "http://engine:8100"
SHARED: dict[str, Any] = {"memory": "shared", "shared_with": [URL]}
WHOLE = ["release", "reload_states", "step", "offload_states", "resume"]
MakeShared = Callable[..., tuple[Harness, MemoryServer]]


@pytest.fixture
def make_shared(make_harness: MakeHarness) -> MakeShared:
    """Makes a trainer that has started, and the rollout server on its device."""

    def make(server: MemoryServer | None = None, **settings: Any) -> tuple[Harness, MemoryServer]:
        server = server or MemoryServer()
        harness = make_harness(**(SHARED | settings))
        harness.memory_server = server
        server.watch(harness.policy, "reload_states", "offload_states", "step", "copy_states", "snapshot")
        harness.start()
        wait_until(lambda: not server.released)
        return harness, server

    return make


def test_the_engine_has_the_memory_except_in_a_step(make_shared: MakeShared) -> None:
    harness, server = make_shared()
    began = ["release", "reload_states", "copy_states", "offload_states", "resume"]
    assert server.events == began, "for the checkpoints: that of the first version, and the last one"
    for _ in range(2):
        server.events.clear()
        harness.step(f"g{harness.trainer.step}")
        wait_until(lambda: not server.released)
        device = [event for event in server.events if event not in ("copy_states", "snapshot")]
        assert device == WHOLE
        assert server.events.index("copy_states") > server.events.index("offload_states")
        assert server.events.index("snapshot") > server.events.index("offload_states")


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 1},
        {"zero_stage": 2, "dtype": "bfloat16"},
        {"zero_stage": 1, "offload_optimizer": True},
        {"zero_stage": 2, "lora": {"rank": 4}},
        {
            "critic": {},
            "algorithm": {"advantage": {"name": "gae"}, "kl": {"estimator": "k2", "coefficient": 0.1}},
        },
    ],
    ids=["stage 1", "stage 2", "offloaded optimizer", "lora", "critic and reference"],
)
def test_the_weights_and_checkpoints_are_the_same_as_with_memory_of_its_own(
    make_harness: MakeHarness, make_shared: MakeShared, settings: dict[str, Any]
) -> None:
    one = make_harness("own", MemoryStream(), **settings).start()
    other, _ = make_shared(**settings)
    for harness in (one, other):
        for step in range(2):
            harness.step(f"g{step}")
    assert differs_by(one.weights(), other.weights()) == 0
    assert _published(one) == _published(other)
    successor = Harness(
        other.root,
        other.settings,
        other.stream,
        other.gateway,
        memory_server=other.memory_server,
        closing=other.closing,
    ).start()
    for harness in (one, successor):
        harness.step("last")
    assert differs_by(one.weights(), successor.weights()) == 0, (
        "the checkpoint had the optimizer's state, too"
    )


def _published(harness: Harness) -> list[bytes]:
    paths = (harness.store.path_of(version) for version in harness.store.versions())
    return [(path / "model.safetensors").read_bytes() for path in paths]


def test_the_weights_of_policy_and_critic_are_elsewhere_between_steps(make_shared: MakeShared) -> None:
    """On CPU, DeepSpeed moves them to other memory of the host."""
    harness, _ = make_shared(critic={}, algorithm={"advantage": {"name": "gae"}})
    modules = [harness.policy.module, harness.policy.critic.module]

    def places() -> list[int]:
        return [next(module.parameters()).data_ptr() for module in modules]

    in_step: list[int] = []
    step = harness.policy.step

    def looking(scale: float = 1.0) -> float:
        in_step.extend(places())
        return step(scale)

    harness.policy.step = looking  # type: ignore[method-assign]
    harness.step("g")
    assert all(one != other for one, other in zip(in_step, places(), strict=True))


def test_an_engine_that_starts_is_not_killed_for_the_trainers_own_start(
    make_shared: MakeShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "START_POLL_S", 0.01)
    _, server = make_shared(MemoryServer(starting=3))
    assert server.events[:5] == [*["starts"] * 3, "release", "reload_states"]


def test_a_step_whose_gradient_is_not_finite_gives_the_memory_back(make_shared: MakeShared) -> None:
    harness, server = make_shared()
    server.events.clear()
    backward = harness.policy.backward
    harness.policy.backward = lambda loss: backward(math.nan * loss)  # type: ignore[method-assign]
    harness.agents.group("g", [1.0, 0.0])
    assert not harness.trainer.run_once()
    wait_until(lambda: not server.released)
    assert server.events == WHOLE
    assert set(harness.session_codes().values()) == {"invalid"}
    harness.policy.backward = backward  # type: ignore[method-assign]
    harness.step("h")


def test_a_trainer_that_is_told_to_stop_in_a_step_gives_the_memory_back(make_shared: MakeShared) -> None:
    harness, server = make_shared()
    step = harness.policy.step

    def stopping(scale: float = 1.0) -> float:
        harness.shared_state.stop()
        return step(scale)

    harness.policy.step = stopping  # type: ignore[method-assign]
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run()
    assert harness.trainer.step == 1
    wait_until(lambda: not server.released)
    assert server.events[-1] == "resume" or "copy_states" in server.events[server.events.index("resume") :]


def test_a_step_that_fails_leaves_the_memory_to_the_end_of_its_time(make_shared: MakeShared) -> None:
    """The process ends, and holds its memory until then. No thread asks for the memory any more."""
    harness, server = make_shared()
    with torch.no_grad():
        next(harness.policy.module.parameters()).fill_(float("nan"))
    harness.agents.group("g", [1.0, 0.0])
    with pytest.raises(Diverged):
        harness.trainer.run()
    assert server.released
    assert server.events[-1] == "step"


@pytest.mark.parametrize("stops", [False, True])
def test_a_trainer_does_not_train_before_the_engine_has_given_its_memory(
    make_shared: MakeShared, stops: bool
) -> None:
    """If it is told to stop while it waits, it ends."""
    harness, server = make_shared()
    server.events.clear()
    told: list[str] = []

    def refused() -> None:
        told.append(harness.waits_for)
        if stops:
            harness.shared_state.stop()

    server.away, server.on_refusal = 10**9 if stops else 3, refused
    harness.agents.group("g", [1.0, 0.0])
    if stops:
        with pytest.raises(Stopped):
            harness.trainer.run_once()
        assert "step" not in server.events
    else:
        assert harness.trainer.run_once()
        assert server.events[:3] == ["release", "reload_states", "step"]
        assert URL in told[-1]
        assert "refused" in told[-1]


def test_a_long_step_asks_the_engine_again(make_shared: MakeShared, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, server = make_shared()
    monkeypatch.setattr(device_memory, "ASK_EVERY_S", 0.01)
    step = harness.policy.step

    def long(scale: float = 1.0) -> float:
        before = server.releases
        wait_until(lambda: server.releases > before + 3)
        return step(scale)

    harness.policy.step = long  # type: ignore[method-assign]
    harness.step("g")
    wait_until(lambda: not server.released)


def test_a_server_that_does_not_take_its_memory_back_delays_nothing(make_shared: MakeShared) -> None:
    """It takes the memory back by itself when its time is over."""
    harness, server = make_shared()
    offload = harness.policy.offload_states

    def offloading() -> None:
        offload()
        server.away = device_memory.ATTEMPTS

    harness.policy.offload_states = offloading  # type: ignore[method-assign]
    harness.step("g0")
    wait_until(lambda: not server.away)
    harness.step("g1")
    assert harness.trainer.step == 2


def test_all_engines_have_given_their_memory_away_at_the_same_time() -> None:
    """The time of the first one is over when both have answered once."""
    one, other, asked, lock = MemoryServer(), MemoryServer(), Counter[str](), Lock()

    def answer(request: httpx.Request) -> httpx.Response:
        with lock:
            asked[request.url.host] += 1
            reply = (one if request.url.host == "one" else other)(request)
            if asked == {"one": 1, "other": 1}:
                one.released = False
            return reply

    state = SharedState()
    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        servers = [RolloutMemory(http, f"http://{name}") for name in ("one", "other")]
        with DeviceMemory(servers, Heartbeat(MemoryStream(), state, 0.01)) as memory:
            memory.take()
            assert asked == {"one": 3, "other": 3}
            assert one.released
            assert other.released


def test_servers_that_hang_do_not_keep_the_trainer_from_asking_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of an engine whose server answers is not taken back during a long step."""
    monkeypatch.setattr(device_memory, "ASK_EVERY_S", 0.01)
    servers = {name: MemoryServer() for name in ("hangs", "hangs-too", "answers")}
    hanging, over = Event(), Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if hanging.is_set() and request.url.host != "answers":
            over.wait(PATIENCE_S)
        return servers[request.url.host](request)

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        asked = [RolloutMemory(http, f"http://{name}") for name in servers]
        with DeviceMemory(asked, Heartbeat(MemoryStream(), SharedState(), 0.01)) as memory:
            memory.take()
            hanging.set()
            before = servers["answers"].releases
            try:
                wait_until(lambda: servers["answers"].releases > before + 3)
            finally:
                over.set()


def test_nothing_is_learned_early_while_the_engine_samples(make_shared: MakeShared) -> None:
    harness, server = make_shared(algorithm={"min_live_rows": 8, "max_tokens": 4})
    server.events.clear()
    harness.agents.group("g0", [1.0, 0.0])
    assert not harness.trainer.run_once()
    assert server.events == []
    assert "already learned" not in harness.waits_for


@pytest.fixture
def rollout_settings(tmp_path: Path) -> dict[str, Any]:
    return memory_sharing(tmp_path)


@pytest.fixture
def rollout_server(tmp_path: Path, rollout_settings: dict[str, Any]) -> Iterator[ServerThread]:
    """A rollout server with an engine double, which dies where SGLang dies."""
    with server_thread(tmp_path, rollout_settings) as server:
        wait_until(server.is_ready)
        yield server


def _forwarded(harness: Harness) -> Callable[[httpx.Request], httpx.Response]:
    """Passes the trainer's requests on to the rollout server."""
    http = httpx.Client(headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=120)
    harness.closing.callback(http.close)

    def forwarded(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        return http.request(request.method, str(request.url), json=body)

    return forwarded


def test_steps_with_a_real_rollout_server(
    turned: TurnedClock, make_harness: MakeHarness, rollout_server: ServerThread
) -> None:
    harness = make_harness(memory="shared", shared_with=[rollout_server.url])
    harness.memory_server = _forwarded(harness)
    seen: list[bool] = []
    step = harness.policy.step

    def looking(scale: float = 1.0) -> float:
        seen.append(rollout_server.status()["released"])
        return step(scale)

    harness.policy.step = looking  # type: ignore[method-assign]
    harness.start()
    harness.step("g0")
    harness.step("g1")
    assert seen == [True, True]
    wait_until(lambda: rollout_server.status()["state"] == "ready")

    def failing(scale: float = 1.0) -> float:
        raise OSError("the device is gone")

    harness.policy.step = failing  # type: ignore[method-assign]
    harness.agents.group("g2", [1.0, 0.0])
    with pytest.raises(OSError, match="the device is gone"):
        harness.trainer.run()
    assert rollout_server.status()["released"]
    turned.turn(device_memory.LEASE_S)
    wait_until(lambda: rollout_server.status()["state"] == "ready")
    assert rollout_server.status()["restarts"] == 0
    assert "engine is dead" not in rollout_server.log.read_text()


def test_trainer_and_engine_that_start_together_start_once(
    make_harness: MakeHarness, rollout_settings: dict[str, Any], tmp_path: Path
) -> None:
    with server_thread(tmp_path, rollout_settings) as server:
        server.control(ready=False)
        harness = make_harness(memory="shared", shared_with=[server.url])
        harness.memory_server = _forwarded(harness)
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(harness.start)
            wait_until(
                lambda: "the engine's memory" in str(harness.shared_state.snapshot.report().waiting_for)
            )
            assert not server.status()["released"]
            server.control()
            starting.result()
        wait_until(server.is_ready)
        assert server.status()["restarts"] == 0
        assert "engine failed" not in server.log.read_text()
        harness.step("g0")


def test_a_rollout_server_that_is_killed_in_a_step_does_not_start_its_engine_before_the_end(
    make_harness: MakeHarness,
    rollout_server: ServerThread,
    rollout_settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(device_memory, "ASK_EVERY_S", 0.1)
    harness = make_harness(memory="shared", shared_with=[rollout_server.url])
    harness.memory_server = _forwarded(harness)
    harness.start()
    step = harness.policy.step
    again: list[ServerThread] = []
    with ExitStack() as started:

        def restarting(scale: float = 1.0) -> float:
            rollout_server.kill()
            again.append(started.enter_context(server_thread(tmp_path, rollout_settings)))
            wait_until(lambda: again[0].status()["released"])
            assert not again[0].is_ready()
            return step(scale)

        harness.policy.step = restarting  # type: ignore[method-assign]
        harness.step("g0")
        wait_until(again[0].is_ready)
