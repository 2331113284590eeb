"""A full disk: the trainer reports it, leaves no partial file in place, and continues when there is room."""

import errno
import json
import os
import resource
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.long_cases import cases
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until
from trainer_service.model.checkpoint_layout import Layout
from trainer_service.model.host_copies import StateCopy, WeightSnapshot
from trainer_service.model.huggingface import WEIGHTS
from trainer_service.shared_state import Phase
from trainer_service.storage.checkpoint import INITIAL, CheckpointBroken, Checkpoints
from trainer_service.storage.durable_files import DiskRefused, write_atomically
from trainer_service.storage.run_state import LedgerStep, RunState

Write = Callable[..., Any]
ROUNDING_S = 1e-6
"""More than the error of a difference of two times."""
SHORT = 16_384
"""Bytes: less than the size of any shard or export, more than that of every other file."""


@pytest.fixture
def writer() -> Iterator[Executor]:
    """The thread that writes checkpoints in a real trainer."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def full(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number))


class Disk:
    """A disk that may have no room. Then it takes half of each write and refuses the rest."""

    def __init__(self, harness: Harness, error: Exception | None = None) -> None:
        self.harness, self.error = harness, error or full()
        self.room = False
        self.gate = Event()
        """Pauses end when it is set."""
        self.gate.set()
        self.said: list[str] = []
        self.pauses_s: list[float] = []
        self.refused = 0

    def short(self, write: Write, half: Callable[..., None]) -> Write:
        def writing(*arguments: Any) -> Any:
            if self.room:
                return write(*arguments)
            half(*arguments)
            self.refused += 1
            raise self.error

        return writing

    def wait(self, patch: pytest.MonkeyPatch, stopped: TurnedClock, pauses: int) -> None:
        """Let pauses of the trainer take no real time, and make room at pause number `pauses`."""

        def paused(seconds: float) -> None:
            stopped.turn(seconds + ROUNDING_S)
            publication = self.harness.trainer.publisher.waits_for
            self.said.append(publication or self.harness.waits_for)
            self.pauses_s.append(seconds)
            self.gate.wait(300)
            self.room = len(self.pauses_s) == pauses

        patch.setattr(self.harness.shared_state, "sleep", paused)


def half_a_shard(_: StateCopy, directory: Path) -> None:
    directory.mkdir()
    (directory / "shard.pt").write_bytes(b"half")


def half_a_version(_: WeightSnapshot, directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(b"half")


def tags(harness: Harness) -> list[str]:
    """The checkpoints, without that of the first version."""
    return sorted(
        path.name
        for path in harness.settings.checkpoint_dir.iterdir()
        if path.is_dir() and path.name != INITIAL
    )


@pytest.mark.parametrize(
    "number", cases([errno.ENOSPC, errno.EIO], long=[errno.EFBIG, errno.EDQUOT, errno.EROFS])
)
def test_a_checkpoint_waits_for_room_and_nothing_is_acknowledged_meanwhile(
    make_harness: MakeHarness,
    writer: Executor,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    stopped: TurnedClock,
) -> None:
    harness = make_harness(writer=writer).start()
    harness.step("g")
    wait_until(lambda: harness.trainer.run_once() or harness.session_codes()["g-0"] == "trained")
    before = (harness.settings.checkpoint_dir / "CURRENT").read_text()
    disk = Disk(harness, full(number))
    disk.wait(monkeypatch, stopped, 4)
    monkeypatch.setattr(StateCopy, "write", disk.short(StateCopy.write, half_a_shard))
    disk.gate.clear()
    harness.step("h")
    wait_until(lambda: disk.pauses_s)
    assert not harness.trainer.run_once()
    assert (harness.settings.checkpoint_dir / "CURRENT").read_text() == before
    assert tags(harness) == [before]
    assert len(harness.pending) == 6
    assert harness.waits_for.endswith(
        "; room on the disk for a checkpoint (checkpoint 00000002-step-00000002 could not be written: "
        f"{os.strerror(number)})"
    )
    assert harness.gateway.announced_versions == [1, 2]
    disk.gate.set()
    wait_until(lambda: harness.trainer.run_once() or harness.session_codes()["h-0"] == "trained")
    assert disk.pauses_s == pytest.approx([0.01, 0.02, 0.04, 0.08])  # each is a difference of two times
    assert harness.sample("disk_refusals_total", what="checkpoint") == 4
    assert [row.step for row in harness.ledger] == [1, 2]
    assert harness.restart().trainer.step == 2


def test_the_training_waits_for_room_when_the_next_checkpoint_is_due(
    make_harness: MakeHarness, writer: Executor, monkeypatch: pytest.MonkeyPatch, stopped: TurnedClock
) -> None:
    """So at most one checkpoint is in memory, and the steps of two checkpoints can be lost."""
    harness = make_harness(writer=writer).start()
    disk = Disk(harness)
    disk.wait(monkeypatch, stopped, 6)
    monkeypatch.setattr(StateCopy, "write", disk.short(StateCopy.write, half_a_shard))
    beat, waiting = harness.heartbeat.beat, []

    def watched(phase: Phase, waiting_for: str | None = None) -> None:
        beat(phase, waiting_for)
        if waiting_for and waiting_for.startswith("room on the disk"):
            waiting.append([row.step for row in harness.ledger])
            disk.gate.set()

    monkeypatch.setattr(harness.heartbeat, "beat", watched)
    disk.gate.clear()
    harness.step("g")
    harness.step("h")
    assert waiting[0] == []
    assert [row.step for row in harness.ledger][:1] == [1]


def test_a_checkpoint_that_is_written_is_in_memory_no_longer(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_states, copies = harness.policy.copy_states, list[weakref.ref[StateCopy]]()

    def copied() -> StateCopy:
        copy = copy_states()
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(harness.policy, "copy_states", copied)
    harness.step("g")
    wait_until(lambda: copies and all(copy() is None for copy in copies))


def test_a_version_waits_for_room_and_is_announced_when_it_is_whole(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, stopped: TurnedClock
) -> None:
    disk = Disk(harness)
    disk.wait(monkeypatch, stopped, 3)
    monkeypatch.setattr(WeightSnapshot, "write", disk.short(WeightSnapshot.write, half_a_version))
    harness.step("g")
    assert (
        disk.said
        == ["room on the disk for version 1 (version 1 could not be written: No space left on device)"] * 3
    )
    assert harness.sample("disk_refusals_total", what="publish") == 3
    assert harness.gateway.announced_versions == [1]
    assert [path.name for path in harness.store.directory.iterdir()] == ["v00000001"]
    assert set(harness.session_codes().values()) == {"trained"}


@pytest.mark.parametrize("what", ["save", "write"])
def test_a_trainer_told_to_stop_while_its_disk_is_full_ends_in_order_and_loses_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    disk = Disk(harness)
    if what == "save":
        monkeypatch.setattr(StateCopy, "write", disk.short(StateCopy.write, half_a_shard))
    else:
        monkeypatch.setattr(WeightSnapshot, "write", disk.short(WeightSnapshot.write, half_a_version))
    harness.agents.group("g", [1.0, 0.0])
    turn = harness.trainer.run_once

    def last() -> bool:
        harness.shared_state.stop()
        return turn()

    monkeypatch.setattr(harness.trainer, "run_once", last)
    harness.trainer.run()  # raises nothing
    assert disk.refused
    assert not list(harness.store.directory.iterdir())
    assert len(harness.pending) == (6 if what == "save" else 0)
    disk.room = True
    again = harness.restart()
    again.trainer.run_once()
    assert set(again.session_codes().values()) == {"trained"}
    assert [row.turns for row in again.ledger] == [["g-0-t", "g-1-t"]]


def test_a_step_waits_until_its_version_number_is_on_disk(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, stopped: TurnedClock
) -> None:
    """The number is reserved before the step. Otherwise the weights would change, and be trained again."""
    disk, before = Disk(harness), harness.weights()
    disk.wait(monkeypatch, stopped, 2)
    changed: list[bool] = []

    def half(*_: object) -> None:
        now = harness.weights()
        changed.append(any(not bool((before[name] == now[name]).all()) for name in before))

    monkeypatch.setattr(
        "trainer_service.storage.run_state.write_atomically", disk.short(write_atomically, half)
    )
    harness.step("g")
    assert changed == [False, False]
    assert "room on the disk for the number of a version" in disk.said[0]


def test_a_file_that_fails_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_descriptor: int) -> None:
        raise full()

    monkeypatch.setattr("trainer_service.storage.durable_files.os.fsync", refused)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "CURRENT", b"content")
    assert not list(tmp_path.iterdir())


def test_an_error_of_another_kind_is_not_retried(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(harness, RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(StateCopy, "write", disk.short(StateCopy.write, half_a_shard))
    harness.agents.group("g", [1.0, 0.0])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        harness.trainer.run_once()


def test_a_line_that_does_not_fit_is_left_out_whole(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.step("g")
    with monkeypatch.context() as patch:
        halved = SimpleNamespace(dumps=lambda _: "half a line")
        patch.setattr("trainer_service.sinks.json", halved)
        patch.setattr("trainer_service.sinks.len", lambda _: 1_000_000, raising=False)
        harness.step("h")
    harness.step("i")
    lines = (harness.root / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]
    assert harness.sample("sink_failures_total", sink="jsonl") == 1


class Shards:
    """Weights with one shard."""

    layout = Layout(ranks=1, zero_stage=1, dtype="float32")

    def copy_states(self) -> "Shards":
        return self

    def write(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "shard").write_bytes(b"1")

    def load(self, directory: Path, tag: str, layout: Layout | None, rate_scale: float = 1.0) -> None: ...


def row(step: int) -> LedgerStep:
    return LedgerStep(step=step, version=step, durable=True, turns=[f"t{step}"], sessions=["s"], tokens=1)


@pytest.mark.parametrize("at", ["os.fsync", "sync_tree", "write_atomically"])
def test_a_checkpoint_that_fails_at_any_write_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    first = saved_checkpoint(checkpoints, Shards(), RunState(step=1, version=1), [row(1)])

    def refused(*_: object) -> None:
        raise full()

    with monkeypatch.context() as patch:
        patch.setattr(f"trainer_service.storage.checkpoint.{at}", refused)  # the first fsync is the ledger's
        with pytest.raises(DiskRefused, match="No space left"):
            saved_checkpoint(checkpoints, Shards(), RunState(step=2, version=2), [row(2)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [first, "CURRENT", "ledger.jsonl"]
    assert len((tmp_path / "ledger.jsonl").read_bytes().splitlines()) == 1
    saved_checkpoint(checkpoints, Shards(), RunState(step=2, version=2), [row(2)])
    assert [each.step for each in checkpoints.ledger(0, 10)] == [1, 2]
    restored = Checkpoints(tmp_path, 2).restore(Shards())
    assert restored is not None
    assert restored.step == 2


def test_if_only_the_sync_of_current_fails_the_save_fails_and_its_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    saved_checkpoint(checkpoints, Shards(), RunState(step=1, version=1), [row(1)])

    def sync(directory: Path) -> None:
        if directory == tmp_path:
            raise full(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.storage.durable_files.sync_directory", sync)
        with pytest.raises(CheckpointBroken, match="could not be synced"):
            saved_checkpoint(checkpoints, Shards(), RunState(step=2, version=2), [row(2)])
    restored = Checkpoints(tmp_path, 2).restore(Shards())
    assert restored is not None
    assert restored.step == 2


def test_incomplete_files_of_dead_processes_are_removed(make_harness: MakeHarness) -> None:
    harness = make_harness()
    for serial in (1, 2, 3):
        half_a_shard(StateCopy({}), harness.settings.checkpoint_dir / f"{serial:08d}-step-00000001")
    (harness.settings.policies_dir / "v00000007.tmp").mkdir()
    harness.start()
    harness.step("g")
    assert tags(harness) == ["00000004-step-00000001"]
    assert [path.name for path in harness.store.directory.iterdir()] == ["v00000001"]


def limit(size: int) -> None:
    """Make every write beyond this size fail, in Python, in torch and in safetensors alike."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    yield limit
    limit(resource.RLIM_INFINITY)


def test_a_real_size_limit_stops_deepspeed_and_safetensors_until_it_is_lifted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, stopped: TurnedClock, limited: Callable[[int], None]
) -> None:
    """It is less than any shard or export, more than every other file, and lifted at every third pause. After
    the checkpoint it is there again."""
    harness.step("g")
    disk, states, write = Disk(harness), list[Any](), harness.checkpoints.write
    disk.wait(monkeypatch, stopped, 0)
    pause = harness.shared_state.sleep

    def paused(seconds: float) -> None:
        pause(seconds)
        if len(disk.said) % 3 == 0:
            states.append(state_of(harness))
            limited(resource.RLIM_INFINITY)

    def write_and_fill_the_disk_again(*arguments: Any) -> str:
        tag = write(*arguments)
        limited(SHORT)
        return tag

    monkeypatch.setattr(harness.shared_state, "sleep", paused)
    monkeypatch.setattr(harness.checkpoints, "write", write_and_fill_the_disk_again)
    limited(SHORT)
    harness.step("h")
    one, both = ["00000001-step-00000001"], ["00000001-step-00000001", "00000002-step-00000002"]
    saving, publishing = states
    assert saving == (one, one[0], [1], 6, ["v00000001"], [1], (3, None)), (
        "no step counts without its checkpoint"
    )
    assert publishing == (both, both[1], [1, 2], 0, ["v00000001"], [1], (3, 3)), (
        "no version without its files"
    )
    assert harness.gateway.announced_versions == [1, 2]
    assert "room on the disk for version 2 (version 2 could" in disk.said[3]
    assert disk.said[3].endswith("File too large)")


def state_of(harness: Harness) -> Any:
    """Checkpoints, the current one, the steps of the ledger, pending entries, versions, those announced, and
    how often the disk refused a checkpoint and a version."""
    refusals = (harness.sample("disk_refusals_total", what=what) for what in ("checkpoint", "publish"))
    current = (harness.settings.checkpoint_dir / "CURRENT").read_text()
    steps = [row.step for row in harness.ledger]
    versions = sorted(path.name for path in harness.store.directory.iterdir())
    announced = harness.gateway.announced_versions
    return tags(harness), current, steps, len(harness.pending), versions, announced, tuple(refusals)
