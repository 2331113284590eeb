"""The files of a trainer by commands: checkpoints belong to their base model, exports can be read by other
programs, and what is deleted is removed once no replay can ask for it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout_queue.trainer_commands import (
    WHOLE_MODEL,
    Command,
    CommandFailed,
    Drop,
    Exported,
    LoadWeights,
    Passed,
    Published,
    Result,
    Saved,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    WeightsLoaded,
)
from tests.support.trainer_service.command_harness import (
    BASE,
    FULL,
    CommandHarness,
    MakeCommandHarness,
    created,
    learn,
    step,
)
from tests.support.trainer_service.command_log import Killed, MemoryCommandLog
from tests.support.trainer_service.harness import MakeHarness
from tests.support.trainer_service.peft_models import peft_model
from trainer_service.commands.saved_models import RECORD
from trainer_service.model.checkpoint_layout import LayoutRefused
from trainer_service.storage.checkpoint import INITIAL, STATE

pytestmark = pytest.mark.numeric


def trained_further(model_path: Path) -> None:
    """Another model at the same path: each weight has changed a little."""
    path = model_path / "model.safetensors"
    save_file({name: tensor * 1.001 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def forget_digests(directory: Path, name: str) -> None:
    """These files are now as an older build writes them, and name no base model."""
    for path in directory.rglob(name):
        path.write_bytes(path.read_bytes().replace(b'"base_digest"', b'"none_digest"'))


def copy_of(model_path: Path, to: Path) -> Path:
    return Path(shutil.copytree(model_path, to))


def trained_over(make_command_harness: MakeCommandHarness, base: Path) -> CommandHarness:
    """A trainer over this base model, whose model a has made a step."""
    harness = make_command_harness(base=base)
    harness.make_step("a")
    return harness


def test_a_checkpoint_belongs_to_its_base_model_and_not_to_its_path(
    make_command_harness: MakeCommandHarness, model_path: Path, tmp_path: Path
) -> None:
    base = copy_of(model_path, tmp_path / "base")
    harness = trained_over(make_command_harness, base)
    assert isinstance(harness.send("a", SaveWeights("x")), Saved)
    harness.stop()
    moved = make_command_harness(log=harness.log, base=copy_of(base, tmp_path / "moved"))
    assert moved.send("b", LoadWeights("a", "x", True)) == WeightsLoaded()
    for path in harness.settings.checkpoint_dir.iterdir():  # only what users have saved is left
        if path.name != "saved":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    trained_further(base)
    other = make_command_harness(log=harness.log, base=base)
    refused = other.send("c", LoadWeights("a", "x", True))
    assert isinstance(refused, CommandFailed)
    assert "checkpoint x is of another base model" in refused.error


def test_a_trainer_does_not_go_on_over_another_base_model(
    make_command_harness: MakeCommandHarness, model_path: Path, tmp_path: Path
) -> None:
    base = copy_of(model_path, tmp_path / "base")
    harness = trained_over(make_command_harness, base)
    harness.stop()
    trained_further(base)
    older = {STATE: "another model than trainer.model_path", RECORD: "models over another base model"}
    for file, sentence in older.items():
        with pytest.raises(LayoutRefused, match=sentence):
            make_command_harness(log=harness.log, base=base)
        forget_digests(harness.settings.checkpoint_dir, file)
    assert make_command_harness(log=harness.log, base=base).trainer.executor.model_ids == {"a"}


def test_a_run_by_turns_does_not_go_on_with_another_model(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path
) -> None:
    """Its first version stays that of its own model. A run that has no step yet begins with the new one."""
    base = copy_of(model_path, tmp_path / "base")
    harness = make_harness(model_path=base).start()
    first = harness.settings.checkpoint_dir / INITIAL / STATE
    written = [first.read_bytes()]
    trained_further(base)
    make_harness(model_path=base).start()
    written.append(first.read_bytes())
    harness = make_harness(model_path=base).start()
    assert [first.read_bytes() == each for each in written] == [False, True], "it is that of the new model"
    harness.step("a")
    trained_further(base)
    with pytest.raises(LayoutRefused, match=r"another model than trainer\.model_path.*`weir up --run-dir"):
        make_harness(model_path=base).start()
    assert first.read_bytes() == written[1]
    forget_digests(harness.settings.checkpoint_dir, STATE)
    assert make_harness(model_path=base).start().trainer.step == 1


def test_a_run_by_commands_does_not_go_on_by_turns_nor_the_other_way(
    make_harness: MakeHarness, make_command_harness: MakeCommandHarness
) -> None:
    by_turns = make_harness("turns").start()
    by_turns.step("a")
    with pytest.raises(LayoutRefused, match=r"trainer\.source turns, not commands.*`weir up --run-dir DIR`"):
        make_command_harness("turns")
    by_commands = make_command_harness("commands")
    by_commands.make_step("a")
    by_commands.stop()
    with pytest.raises(LayoutRefused, match=r"trainer\.source commands, not turns"):
        make_harness("commands").start()


def files(harness: CommandHarness, model_id: str = "a") -> list[Path]:
    return sorted((harness.settings.checkpoint_dir / "saved" / model_id).glob("*/*"))


def adapters(harness: CommandHarness) -> list[str]:
    return sorted(path.name for path in (harness.settings.policies_dir / "adapters" / "a").glob("*v*"))


def saved(harness: CommandHarness) -> MemoryCommandLog:
    assert isinstance(harness.make_step("a", SaveWeights("x")), Saved)
    return harness.log


def test_deleted_weights_are_gone_and_then_their_files_go(
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


def test_a_replay_of_an_earlier_load_finds_the_files(
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


def test_a_kill_between_removal_and_note_does_no_harm(
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


def test_a_late_note_of_an_adapter_leaves_no_directory(
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


def exported(result: Result) -> Path:
    assert isinstance(result, Exported), result
    place = Path(result.location)
    assert place.is_absolute()
    assert result.size_bytes == sum(path.stat().st_size for path in place.iterdir())
    return place


def places(harness: CommandHarness) -> list[Path]:
    return sorted((harness.settings.policies_dir / "external" / "a").glob("*/*"))


def scores_of(model: torch.nn.Module, asked: Passed) -> list[float]:
    """log p of the targets of `learn(1)`, by plain transformers."""
    (datum,) = learn(1).data
    with torch.no_grad():
        logits = model(torch.tensor([list(datum.tokens)])).logits[0].double()
    targets = torch.tensor(list(datum.targets))
    lp_T: list[float] = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
    assert len(lp_T) == len(asked.logprobs[0])
    return lp_T


def test_an_adapter_is_exported_as_peft_reads_it(make_command_harness: MakeCommandHarness) -> None:
    harness = make_command_harness()
    harness.make_step("a")
    place = exported(harness.send("a", SaveExternal("x")))
    assert sorted(path.name for path in place.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((place / "adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == BASE, "and no directory of the trainer's disk"
    model = peft_model(harness.settings.model_path, place)
    expected = harness.passed("a", learn(1, forward_only=True))
    assert scores_of(model, expected) == pytest.approx(list(expected.logprobs[0]), abs=1e-5)


def test_all_weights_are_exported_for_transformers(
    make_command_harness: MakeCommandHarness,
) -> None:
    harness = make_command_harness()
    for command in (FULL, learn(1), step()):
        harness.send("a", command)
    place = exported(harness.send("a", SaveExternal("x")))
    names = {path.name for path in place.iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    assert not {"manifest.json", "STABLE"} & names
    expected = harness.passed("a", learn(1, forward_only=True))
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    assert scores_of(model, expected) == pytest.approx(list(expected.logprobs[0]), abs=1e-5)


def test_a_name_is_used_once_until_its_export_is_deleted(make_command_harness: MakeCommandHarness) -> None:
    harness = make_command_harness()
    harness.make_step("a")
    first = exported(harness.send("a", SaveExternal("x")))
    refused = harness.send("a", SaveExternal("x"))
    assert refused == CommandFailed("a has an export x already", "user")
    assert isinstance(harness.send("a", SaveExternal("../x")), CommandFailed)
    harness.log.drop("a", "external_weights/x", "a:3")
    second = exported(harness.send("a", SaveExternal("x")))
    assert places(harness) == [first, second], "a replay of what came before the deletion may begin"
    harness.stop()
    harness.trainer.run_once()
    assert places(harness) == [second]
    assert not harness.log.weights


def test_a_kill_before_the_answer_changes_no_file(make_command_harness: MakeCommandHarness) -> None:
    log = MemoryCommandLog()
    harness = make_command_harness(log=log)
    harness.make_step("a")
    save, after = log.append("a", SaveExternal("x")), log.append("a", learn(2))
    log.append("a", step())
    log.answers_until_killed = 0
    with pytest.raises(Killed):
        harness.trainer.run_once()
    (place,) = places(harness)
    weights = load_file(place / "adapter_model.safetensors")
    log.answers_until_killed = None
    again = make_command_harness(log=log)
    again.trainer.run_once()
    assert exported(log.last(save)) == place
    assert isinstance(log.last(after), Passed)
    third = make_command_harness(log=log)  # nothing is in a checkpoint, so all commands come again
    third.trainer.run_once()
    assert len(log.results[save]) == 1, "what is answered is not made again"
    assert [path.name for path in places(third)] == [place.name]
    after_all = load_file(place / "adapter_model.safetensors")
    assert all((value == weights[name]).all() for name, value in after_all.items())
    assert any((value != weights[name]).any() for name, value in third.weights("a").items())
