"""A broken checkpoint is an error: the trainer neither loads it nor silently starts from another state."""

from pathlib import Path

import pytest

from tests.support.trainer_service.checkpoints import saved_checkpoint
from trainer_service.groups.acknowledgement import Acknowledgement
from trainer_service.model.checkpoint_layout import Layout
from trainer_service.storage.checkpoint import CheckpointBroken, Checkpoints
from trainer_service.storage.durable_files import lock_directory
from trainer_service.storage.run_state import LedgerStep, RunState


class Weights:
    """Weights that are a single number in one shard."""

    value = 0
    layout = Layout(ranks=1, zero_stage=1, dtype="float32")

    def copy_states(self) -> "Weights":
        copy = Weights()
        copy.value = self.value
        return copy

    def write(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "shard").write_text(str(self.value), encoding="utf-8")

    def load(self, directory: Path, tag: str, layout: Layout | None, rate_scale: float = 1.0) -> None:
        assert layout == self.layout
        self.value = int((directory / tag / "shard").read_text(encoding="utf-8"))


def saved(checkpoints: Checkpoints, step: int) -> str:
    weights = Weights()
    weights.value = step
    row = LedgerStep(
        step=step, version=step, durable=True, turns=[f"t{step}"], sessions=[f"s{step}"], tokens=3
    )
    state = RunState(step=step, version=step, owed=Acknowledgement(["1-0"], {}, []))
    return saved_checkpoint(checkpoints, weights, state, [row])


def test_two_trainers_cannot_share_a_directory(tmp_path: Path) -> None:
    with (
        lock_directory(tmp_path / "run"),
        pytest.raises(SystemExit, match="another trainer"),
        lock_directory(tmp_path / "run"),
    ):
        pass
    with lock_directory(tmp_path / "run"):
        pass


def test_a_run_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, 2).restore(Weights()) is None


def test_the_last_finished_checkpoint_is_restored(tmp_path: Path) -> None:
    checkpoints, weights = Checkpoints(tmp_path, 2), Weights()
    for step in (1, 2, 3):
        saved(checkpoints, step)
    (tmp_path / "00000009-step-00000004").mkdir()
    state = Checkpoints(tmp_path, 2).restore(weights)
    assert state is not None
    assert (state.step, weights.value, state.owed.entry_ids) == (3, 3, ["1-0"])


def test_directories_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "0").mkdir()
    checkpoints, weights = Checkpoints(tmp_path, 2), Weights()
    for step in (1, 2, 3):
        saved(checkpoints, step)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "0", "00000002-step-00000002", "00000003-step-00000003", "lost+found",
    ]  # fmt: skip
    assert Checkpoints(tmp_path, 2).restore(weights) is not None


@pytest.mark.parametrize("damage", ["missing", "short", "no state", "ledger"])
def test_a_broken_checkpoint_is_an_error_not_a_fresh_start(tmp_path: Path, damage: str) -> None:
    shard = tmp_path / saved(Checkpoints(tmp_path, 2), 10) / "shard"
    if damage == "missing":
        shard.unlink()
    elif damage == "short":
        shard.write_text("1", encoding="utf-8")
    elif damage == "no state":
        (shard.parent / "state.json").unlink()
    else:
        (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(CheckpointBroken):
        Checkpoints(tmp_path, 2).restore(Weights())


def test_the_ledger_holds_durable_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    saved(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.storage.checkpoint.write_atomically", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            saved(checkpoints, 2)
    assert [row.step for row in checkpoints.ledger(0, 10)] == [1]
    again = Checkpoints(tmp_path, 2)
    again.restore(Weights())
    saved(again, 3)
    assert [row.step for row in again.ledger(0, 10)] == [1, 3]
    assert [row.step for row in again.ledger(1, 10)] == [3]
