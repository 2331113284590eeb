"""A trainer by commands that is killed at any moment ends with the weights of one that is not."""

from collections.abc import Sequence

import pytest
import torch

from rollout_queue.commands.command import Command, LoadWeights, SaveForSampler, SaveWeights
from rollout_queue.commands.result import (
    Published,
    Result,
    Saved,
)
from tests.support.long_cases import cases
from tests.support.trainer_service.command_harness import (
    CommandHarness,
    MakeCommandHarness,
    created,
    learn,
    step,
)
from tests.support.trainer_service.command_log import Killed, MemoryCommandLog

pytestmark = pytest.mark.numeric

SCRIPT: Sequence[tuple[str, Command]] = [
    ("a", created(rank=4, seed=1)),
    ("a", learn(1)),
    ("b", created(rank=2, seed=2)),
    ("a", learn(2)),
    ("b", learn(3)),
    ("a", step()),
    ("a", SaveWeights("x")),
    ("c", LoadWeights("a", "x", True)),
    ("b", step()),
    ("c", learn(12)),
    ("a", learn(4)),
    ("b", LoadWeights("a", "missing", True)),
    ("b", learn(5, forward_only=True)),
    ("a", SaveForSampler("s")),
    ("b", learn(6)),
    ("a", step(0.02, beta1=0.5)),
    ("a", SaveWeights("x", overwrite=True)),
    ("c", LoadWeights("a", "x", True)),
    ("a", learn(7)),
    ("c", learn(8)),
    ("b", step(0.03)),
    ("c", step()),
    ("a", LoadWeights("a", "x", True)),
    ("a", learn(9)),
    ("b", learn(10)),
    ("a", step()),
    ("c", SaveForSampler("t")),
    ("a", SaveForSampler("s2")),
    ("c", LoadWeights("a", "x", False)),
    ("c", learn(11)),
    ("c", step()),
]
MODELS = ("a", "b", "c")
Outcome = tuple[list[Result], list[torch.Tensor]]


def written() -> tuple[MemoryCommandLog, list[str]]:
    """A log with all commands, and their request ids."""
    log = MemoryCommandLog()
    return log, [log.append(model_id, command) for model_id, command in SCRIPT]


def finished(harness: CommandHarness) -> CommandHarness:
    while not harness.is_idle:
        harness.trainer.run_once()
    return harness


def outcome(harness: CommandHarness, request_ids: Sequence[str]) -> Outcome:
    """The results, with paths and sizes left out, and the weights."""
    results = [_without_place(harness.log.last(each)) for each in request_ids]
    return results, [value for each in MODELS for value in harness.weights(each).values()]


def _without_place(result: Result) -> Result:
    match result:
        case Published(policy, version):
            return Published(policy, version, "")
        case Saved():
            return Saved(0)
    return result


SETTINGS: dict[str, dict[str, int]] = {  # when checkpoints are made
    "every-second-step": {"checkpoint_every_steps": 2},
    "when-it-frees": {"log": 1},
    "never": {"zero_stage": 0},
}
IN_SHORT = {("every-second-step", 6), ("every-second-step", 23), ("when-it-frees", 13), ("never", 16)}
"""Before the answer to weights that are saved, loaded, published, and saved again. The long run has all."""
KILLS = [
    pytest.param(case, answers, marks=() if (case, answers) in IN_SHORT else pytest.mark.long)
    for case in SETTINGS
    for answers in range(len(SCRIPT))
]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[int, Outcome]:
    """By the stage of ZeRO. When checkpoints are made changes nothing."""
    return {}


def assert_as_uninterrupted(
    make_command_harness: MakeCommandHarness,
    uninterrupted: dict[int, Outcome],
    kills: Sequence[int],
    settings: dict[str, int],
) -> None:
    """Kill a trainer after so many answers, and the next one after so many of its own. A last one ends."""
    settings = dict(settings)
    log, request_ids = written()
    log.bytes = (900 * settings.pop("log", 0), 1000)
    stage = settings.get("zero_stage", 1)
    if stage not in uninterrupted:
        whole = finished(make_command_harness("whole", written()[0], zero_stage=stage))
        assert [(each.name, each.version) for each in whole.adapters] == [("a", 1), ("c", 1), ("a", 2)]
        uninterrupted[stage] = outcome(whole, request_ids)
    for answers in kills:
        log.answers_until_killed = answers
        with pytest.raises(Killed):
            finished(make_command_harness("killed", log, **settings))
    log.answers_until_killed = None
    after = finished(make_command_harness("killed", log, **settings))
    _assert_same(outcome(after, request_ids), uninterrupted[stage])


@pytest.mark.parametrize(("case", "answers"), KILLS)
def test_a_kill_before_any_answer_changes_nothing(
    make_command_harness: MakeCommandHarness, uninterrupted: dict[int, Outcome], case: str, answers: int
) -> None:
    assert_as_uninterrupted(make_command_harness, uninterrupted, [answers], SETTINGS[case])


@pytest.mark.parametrize(
    ("first", "second"),
    cases([(20, 5)], long=[(a, b) for a in (10, 15, 20, 25, 29) for b in (1, 2, 3, 5) if (a, b) != (20, 5)]),
)
def test_a_second_kill_while_commands_are_carried_out_again_changes_nothing(
    make_command_harness: MakeCommandHarness, uninterrupted: dict[int, Outcome], first: int, second: int
) -> None:
    assert_as_uninterrupted(make_command_harness, uninterrupted, [first, second], SETTINGS["when-it-frees"])


def _assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    assert len(found[1]) == len(expected[1])
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
