"""The crash matrix: its moments around checkpoints and rollbacks, and the table of its runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from redis import Redis

from rollout_queue.contract.published_policy import STABLE
from rollout_queue.redis import key_names
from tests.crash import table
from tests.crash.checkpoints import before_acknowledge, owed
from tests.crash.result import Kill, Result, write
from tests.crash.rollbacks import begun, kept, unanswered, unpublished
from tests.crash.system import CrashSystem
from tests.crash.waits import NeverCame
from tests.crash.windows import WINDOWS
from trainer_service.groups.acknowledgement import Acknowledgement
from trainer_service.groups.guards import Recovery, RecoveryState
from trainer_service.storage.checkpoint import CURRENT, STATE
from trainer_service.storage.run_state import RunState
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

# Between a checkpoint and its acknowledgement


TAG = "00000001-step-00000001"


class PausedRedis:
    """A Redis that can stop taking writes; the trainer's checkpoint ends right after that."""

    def __init__(self, pending: list[str], end: Callable[[], None]) -> None:
        self.paused = False
        self._pending, self._end = pending, end

    def client_pause(self, milliseconds: int, *, all: bool) -> None:  # noqa: A002 - the name in redis-py
        assert not all, "the test reads the pending entries meanwhile"
        self.paused = True
        self._end()

    def client_unpause(self) -> None:
        self.paused = False

    def xpending_range(self, *_: object) -> list[dict[str, bytes]]:
        return [{"message_id": entry_id.encode()} for entry_id in self._pending]


def system_with(directory: Path, pending: list[str], monkeypatch: pytest.MonkeyPatch) -> CrashSystem:
    """A trainer that goes on with its first checkpoint whenever the test looks away."""
    shards = directory / "checkpoints" / TAG
    state = RunState(step=1, version=1, owed=Acknowledgement(["1-0", "2-0"], {}, []))

    def end() -> None:
        assert (shards / STATE).exists(), "before STATE, the trainer needs a Redis that takes writes"
        (shards.parent / CURRENT).write_text(TAG)

    steps = iter(
        (
            lambda: shards.mkdir(parents=True),
            lambda: (shards / "shard").touch(),
            lambda: (shards / STATE).write_bytes(msgspec.json.encode(state)),
        )
    )
    monkeypatch.setattr("tests.crash.waits.time.sleep", lambda seconds: next(steps)())
    redis = cast(Redis, PausedRedis(pending, end))
    return CrashSystem(cast(Stack, None), StackSettings(run_dir=directory), redis)


def test_redis_takes_no_writes_between_a_checkpoint_and_its_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = system_with(tmp_path, ["2-0", "3-0"], monkeypatch)
    before_acknowledge(system)
    redis = cast(PausedRedis, system.redis)
    assert redis.paused
    assert owed(system)
    assert not redis.paused


def test_the_moment_has_passed_if_the_entries_are_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = system_with(tmp_path, ["3-0"], monkeypatch)
    with pytest.raises(NeverCame):
        before_acknowledge(system)
    assert not cast(PausedRedis, system.redis).paused


# In a rollback, by what the trainer has written so far


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
    hashes[key_names.RESERVED] = {"version": b"%d" % reserved}
    hashes[key_names.TRAINER] = {"version": b"%d" % version, "state": state.encode()}


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


@pytest.mark.parametrize(("status", "died"), [(None, True), (500, True), (404, False), (504, False)])
def test_a_rollback_is_unanswered_if_the_trainer_dies(
    system: CrashSystem, monkeypatch: pytest.MonkeyPatch, status: int | None, died: bool
) -> None:
    """A trainer that lost a rank may answer before it ends."""

    def request(method: str, *_: object, **__: object) -> httpx.Response:
        if status is None:
            raise httpx.RemoteProtocolError("the server disconnected")
        return httpx.Response(status, request=httpx.Request(method, "http://trainer"))

    monkeypatch.setattr(httpx, "request", request)
    system.ask_trainer("POST", "/rollback", {"version": 2})
    assert unanswered(system) == died
    kept(system)


# Runs can be added up


GATEWAY, ENGINE = "gateway: turns in flight", "engine: sampling"


def test_results_of_several_runs_make_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = (
        Result(7, (Kill(ENGINE, True, 9.0, 20), Kill(GATEWAY, True, 2.0, 30)), 60, ()),
        Result(12, (Kill(GATEWAY, False, 4.0, 5), Kill("gone: since", True, 1.0, 0)), 10, ("lost: a turn",)),
    )
    paths = [tmp_path / f"{run.seed}.json" for run in runs]
    for run, path in zip(runs, paths, strict=True):
        write(run, path)
    monkeypatch.setattr("sys.argv", ["table", *(str(path) for path in paths)])
    table.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == list(table.HEAD)
    assert rows[2:] == [
        [GATEWAY, "2", "1", "1", "3.0", "35", "", "7, 12"],
        [ENGINE, "1", "1", "0", "9.0", "20", "", "7"],
        ["gone: since", "1", "1", "0", "1.0", "0", "", "12"],
        ["all", "4", "3", "1", "", "70", "1", "7, 12"],
    ]


def test_the_reliability_page_names_every_window() -> None:
    page = (Path(__file__).parents[3] / "docs/reliability.md").read_text(encoding="utf-8")
    section = page.partition("## Crash matrix")[2].split("\n## ")[0]
    items = [item.replace("\n  ", " ").split("**: ") for item in section.split("\n- **")[1:]]
    rows = {(victim, name) for victim, names in items for name in names.split("\n")[0].split("; ")}
    assert {(window.victim, window.name) for window in WINDOWS} <= rows
