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


KILLS = [
    pytest.param(case, answers, marks=() if answers % 3 == at else pytest.mark.long)
    for at, case in enumerate(SETTINGS)
    for answers in range(len(SCRIPT))
]
"""Every kill in every case. In the short run, each kill is made in one case."""


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Outcome]:
    """By settings."""
    return {}


@pytest.mark.parametrize(("case", "answers"), KILLS)
def test_a_kill_before_any_answer_changes_nothing(
    make_command_harness: MakeCommandHarness, uninterrupted: dict[str, Outcome], answers: int, case: str
) -> None:
    settings = dict(SETTINGS[case])
    log, request_ids = written()
    log.bytes = (900 * settings.pop("log", 0), 1000)
    if case not in uninterrupted:
        whole = make_command_harness("whole", written()[0], **settings)
        uninterrupted[case] = outcome(finished(whole), request_ids)
    log.answers_until_killed = answers
    with pytest.raises(Killed):
        finished(make_command_harness("killed", log, **settings))
    log.answers_until_killed = None
    after = finished(make_command_harness("killed", log, **settings))
    _assert_same(outcome(after, request_ids), uninterrupted[case])


@pytest.mark.parametrize("first", [10, 15, 20, 25, 29])
@pytest.mark.parametrize("second", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3)), 5])
def test_a_second_kill_while_commands_are_carried_out_again_changes_nothing(
    make_command_harness: MakeCommandHarness, uninterrupted: dict[str, Outcome], first: int, second: int
) -> None:
    log, request_ids = written()
    log.bytes = (900, 1000)
    if "two kills" not in uninterrupted:
        uninterrupted["two kills"] = outcome(
            finished(make_command_harness("whole", written()[0])), request_ids
        )
    for answers in (first, second):
        log.answers_until_killed = answers
        with pytest.raises(Killed):
            finished(make_command_harness("killed", log))
    log.answers_until_killed = None
    _assert_same(
        outcome(finished(make_command_harness("killed", log)), request_ids), uninterrupted["two kills"]
    )


def test_the_adapters_of_a_model_have_consecutive_versions(make_command_harness: MakeCommandHarness) -> None:
    harness = finished(make_command_harness("whole", written()[0]))
    assert [(each.name, each.version) for each in harness.adapters] == [("a", 1), ("c", 1), ("a", 2)]


def _assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    assert len(found[1]) == len(expected[1])
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
