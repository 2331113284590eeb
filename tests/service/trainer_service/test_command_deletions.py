"""A trainer by commands removes the files of deleted weights, once no replay can ask for them."""

from pathlib import Path

import pytest

from rollout_queue.commands.command import Command, LoadWeights, SaveExternal, SaveForSampler, SaveWeights
from rollout_queue.commands.log import WHOLE_MODEL, Drop
from rollout_queue.commands.result import CommandFailed, Published, Saved, WeightsLoaded
from tests.support.trainer_service.command_harness import (
    CommandHarness,
    MakeCommandHarness,
    created,
    learn,
    step,
)
from tests.support.trainer_service.command_log import Killed, MemoryCommandLog

pytestmark = pytest.mark.numeric


def files(harness: CommandHarness, model_id: str = "a") -> list[Path]:
    return sorted((harness.settings.checkpoint_dir / "saved" / model_id).glob("*/*"))


def adapters(harness: CommandHarness) -> list[str]:
    return sorted(path.name for path in (harness.settings.policies_dir / "adapters" / "a").glob("*v*"))


def saved(harness: CommandHarness) -> MemoryCommandLog:
    for command in (created(), learn(1), step(), SaveWeights("x")):
        result = harness.send("a", command)
    assert isinstance(result, Saved)
    return harness.log


def test_deleted_weights_are_gone_for_later_commands_and_then_their_files_go(
    make_command_harness: MakeCommandHarness,
) -> None:
    harness = make_command_harness()
    log = saved(harness)
    harness.send("late", created())
    harness.send("late", learn(1))
    log.drop("a", "weights/x", "a:3")
    assert isinstance(harness.send("b", LoadWeights("a", "x", True)), CommandFailed)
    assert isinstance(harness.send("a", SaveWeights("x")), Saved), "the name is free again"
    assert harness.send("b", LoadWeights("a", "x", True)) == WeightsLoaded()
    harness.trainer.run_once()
    assert len(files(harness)) == 2, "the gradient of `late` is in no checkpoint, so commands may be replayed"
    assert log.weights
    harness.send("late", step())
    for _ in range(3):
        harness.trainer.run_once()
    assert len(files(harness)) == 1
    assert not log.weights
    assert harness.send("c", LoadWeights("a", "x", True)) == WeightsLoaded()


def test_a_replay_of_a_load_before_the_deletion_finds_the_files(
    make_command_harness: MakeCommandHarness,
) -> None:
    harness = make_command_harness()
    log = saved(harness)
    load = log.append("b", LoadWeights("a", "x", True))
    log.answers_until_killed = 0
    with pytest.raises(Killed):
        harness.trainer.run_once()
    log.answers_until_killed = None
    log.drop("a", "weights/x", "a:3")
    after = log.append("c", LoadWeights("a", "x", True))
    again = make_command_harness(log=log)
    again.trainer.run_once()
    assert log.last(load) == WeightsLoaded()
    assert isinstance(log.last(after), CommandFailed)
    weights = again.weights("b")
    for _ in range(3):
        again.trainer.run_once()
    assert files(again) == [], "an idle trainer makes a checkpoint for it"
    assert not log.weights
    third = make_command_harness(log=log)
    assert all((value == weights[name]).all() for name, value in third.weights("b").items())


class ForgetfulLog(MemoryCommandLog):
    """The process dies when the files are gone, and the note is not."""

    dies = False

    def forget_weights(self, model_id: str, name: str, deleted: str) -> None:
        if self.dies:
            raise Killed
        super().forget_weights(model_id, name, deleted)


def test_a_kill_between_removal_and_note_is_made_good_at_the_next_start(
    make_command_harness: MakeCommandHarness,
) -> None:
    log = ForgetfulLog()
    harness = make_command_harness(log=log)
    saved(harness)
    harness.stop()
    log.drop("a", "weights/x", "a:3")
    log.dies = True
    with pytest.raises(Killed):
        harness.trainer.run_once()
    assert (files(harness), len(log.weights)) == ([], 1)
    log.dies = False
    make_command_harness(log=log).trainer.run_once()
    assert not log.weights


@pytest.mark.parametrize("unanswered", [SaveWeights("y"), SaveForSampler("t")])
def test_nothing_of_a_deleted_model_stays(
    make_command_harness: MakeCommandHarness, unanswered: Command
) -> None:
    harness = make_command_harness()
    log = saved(harness)
    for command in (SaveExternal("z"), SaveForSampler("s"), unanswered):
        log.append("a", command)
    log.answers_until_killed = 2
    with pytest.raises(Killed):
        harness.trainer.run_once()
    published = isinstance(unanswered, SaveForSampler)
    written = (1, ["v00000001", "v00000002"]) if published else (2, ["v00000001"])
    assert (len(files(harness)), adapters(harness)) == written, "it died before it could say so"
    directories = [harness.settings.policies_dir / each / "a" for each in ("external", "adapters")]
    directories.append(harness.settings.checkpoint_dir / "saved" / "a")
    assert all(each.exists() for each in directories)
    log.answers_until_killed, last = None, log.kept[-1].position
    log.ends["a"], log.weights["a", WHOLE_MODEL] = "its record is removed", [Drop(last, last)]
    log.versions["a", 1] = log.kept[-2].position
    again = make_command_harness(log=log)
    for _ in range(3):
        again.trainer.run_once()
    assert (log.kept, log.weights, log.versions) == ([], {}, {}), "an idle trainer frees the log"
    assert again.forgotten == [("a", 1), ("a", 2)][: len(written[1])], "engines are to forget them, too"
    assert not any(each.exists() for each in directories)


def test_a_note_of_an_adapter_that_comes_late_leaves_no_directory(
    make_command_harness: MakeCommandHarness,
) -> None:
    harness = make_command_harness()
    log = saved(harness)
    harness.send("a", SaveForSampler("s"))
    last = log.kept[-1].position
    log.ends["a"], log.weights["a", WHOLE_MODEL] = "its record is removed", [Drop(last, last)]
    for _ in range(3):
        harness.trainer.run_once()
    assert not log.weights
    log.versions["a", 1] = last
    harness.trainer.run_once()
    assert not log.versions
    assert not (harness.settings.policies_dir / "adapters" / "a").exists()


def test_versions_that_nobody_can_name_are_removed(make_command_harness: MakeCommandHarness) -> None:
    harness = make_command_harness()
    log = saved(harness)
    for name in ("s", "t"):
        assert isinstance(harness.send("a", SaveForSampler(name)), Published)
    log.versions["a", 1] = log.kept[-2].position
    harness.trainer.run_once()
    assert adapters(harness) == ["v00000001", "v00000002"], "a replay could publish it"
    harness.stop()
    harness.trainer.run_once()
    assert adapters(harness) == ["v00000002"]
    assert harness.forgotten == [("a", 1)], "engines are to forget it, too"
    assert not log.versions
