"""A trainer by commands writes exports that other programs can read, once each, and removes deleted ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout_queue.commands.command import SaveExternal
from rollout_queue.commands.result import CommandFailed, Exported, Passed, Result
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
from tests.support.trainer_service.peft_models import peft_model

pytestmark = pytest.mark.numeric


def exported(result: Result) -> Path:
    assert isinstance(result, Exported), result
    place = Path(result.location)
    assert place.is_absolute()
    assert result.size_bytes == sum(path.stat().st_size for path in place.iterdir())
    return place


def places(harness: CommandHarness) -> list[Path]:
    return sorted((harness.settings.policies_dir / "external" / "a").glob("*/*"))


def trained(harness: CommandHarness) -> None:
    """Model a has made a step."""
    for command in (created(), learn(1), step()):
        harness.send("a", command)


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
    trained(harness)
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


def test_all_weights_are_exported_as_a_model_of_transformers(
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
    trained(harness)
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
    trained(harness)
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
