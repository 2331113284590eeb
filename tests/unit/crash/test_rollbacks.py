"""The moments of a rollback, by what the trainer has written so far."""

from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from redis import Redis

from rollout_queue.contract.policies.policy import STABLE
from rollout_queue.redis import keys
from tests.crash.rollbacks import begun, kept, unanswered, unpublished
from tests.crash.system import CrashSystem
from trainer_service.groups.undone import Recovery, RecoveryState
from trainer_service.storage.checkpoint import CURRENT, STATE
from trainer_service.storage.run_state import RunState
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

TO_VERSION_2 = RecoveryState(done=[Recovery(5, 2, 4, "an operator asked for it", automatic=False, at=0.0)])


class FakeRedis:
    """The hashes that the trainer writes."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, bytes]] = {}

    def hmget(self, key: str, *names: str) -> list[bytes | None]:
        return [self.hashes.get(key, {}).get(name) for name in names]


class FakeStack:
    trainer_url = "http://trainer"


@pytest.fixture
def system(tmp_path: Path) -> CrashSystem:
    redis = cast(Redis, FakeRedis())
    return CrashSystem(cast(Stack, FakeStack()), StackSettings(run_dir=tmp_path), redis)


def says(system: CrashSystem, reserved: int, version: int, state: str) -> None:
    hashes = cast(FakeRedis, system.redis).hashes
    hashes[keys.RESERVED] = {"version": b"%d" % reserved}
    hashes[keys.TRAINER] = {"version": b"%d" % version, "state": state.encode()}


def saved(system: CrashSystem, serial: int, state: RunState) -> None:
    tag = f"{serial:08d}-step-{state.step:08d}"
    (system.checkpoints / tag).mkdir(parents=True)
    (system.checkpoints / tag / STATE).write_bytes(msgspec.json.encode(state))
    (system.checkpoints / CURRENT).write_text(tag)


def test_a_rollback_has_begun_when_a_number_is_reserved_outside_of_a_step(system: CrashSystem) -> None:
    assert not begun(system)
    for reserved, version, state, expected in (
        (4, 4, "waiting", False),
        (5, 4, "training", False),
        (5, 4, "waiting", True),
        (5, 5, "waiting", False),
    ):
        says(system, reserved, version, state)
        assert begun(system) == expected


def test_a_rollback_is_unpublished_from_its_checkpoint_until_its_version_is_written(
    system: CrashSystem,
) -> None:
    assert not unpublished(system)
    saved(system, 1, RunState(step=4, version=4))
    assert not unpublished(system)
    saved(system, 2, RunState(step=4, version=5, recovery=TO_VERSION_2))
    assert unpublished(system)
    (system.policies / "v00000005").mkdir(parents=True)
    assert unpublished(system)
    (system.policies / "v00000005" / STABLE).touch()
    assert not unpublished(system)
    saved(system, 3, RunState(step=5, version=6, recovery=TO_VERSION_2))
    assert not unpublished(system)


@pytest.mark.parametrize("remembered", [True, False])
def test_a_rollback_that_was_answered_has_to_outlive_the_kill(
    system: CrashSystem, monkeypatch: pytest.MonkeyPatch, remembered: bool
) -> None:
    def request(method: str, *_: object, **__: object) -> httpx.Response:
        done = [{"version": 5}] if remembered else []
        body: Any = {"version": 5} if method == "POST" else {"recoveries": done}
        return httpx.Response(200, json=body, request=httpx.Request(method, "http://trainer"))

    monkeypatch.setattr(httpx, "request", request)
    system.ask_trainer("POST", "/rollback", {"version": 2})
    assert not unanswered(system)
    if remembered:
        kept(system)
        return
    with pytest.raises(AssertionError, match="was answered"):
        kept(system)


def test_a_rollback_is_unanswered_if_the_trainer_dies(
    system: CrashSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(*_: object, **__: object) -> httpx.Response:
        raise httpx.RemoteProtocolError("the server disconnected")

    monkeypatch.setattr(httpx, "request", request)
    system.ask_trainer("POST", "/rollback", {"version": 2})
    assert unanswered(system)
    kept(system)


@pytest.mark.parametrize(("status", "died"), [(500, True), (404, False), (504, False)])
def test_a_trainer_that_lost_a_rank_may_answer_before_it_ends(
    system: CrashSystem, monkeypatch: pytest.MonkeyPatch, status: int, died: bool
) -> None:
    def request(method: str, *_: object, **__: object) -> httpx.Response:
        return httpx.Response(status, request=httpx.Request(method, "http://trainer"))

    monkeypatch.setattr(httpx, "request", request)
    system.ask_trainer("POST", "/rollback", {"version": 2})
    assert unanswered(system) == died
    kept(system)
