"""The moment between a checkpoint and its acknowledgement."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
from redis import Redis

from tests.crash.checkpoints import before_acknowledge, owed
from tests.crash.system import CrashSystem
from tests.crash.waits import NeverCame
from trainer_service.groups.acknowledgement import Acknowledgement
from trainer_service.storage.checkpoint import CURRENT, STATE
from trainer_service.storage.run_state import RunState
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

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
