"""Two real ranks carry out commands as one does."""

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rollout_queue.trainer_commands import (
    Command,
    ForwardBackward,
    LoadWeights,
    Passed,
    Result,
    SaveWeights,
    Stepped,
)
from tests.support.long_cases import cases
from tests.support.tolerances import ulps
from tests.support.trainer_service.command_harness import (
    MakeCommandHarness,
    created,
    learn,
    random_datum,
    step,
)
from tests.support.trainer_service.command_log import MemoryCommandLog
from tests.support.trainer_service.rank_pair import RankPair
from tests.support.trainer_service.rank_tasks import LOG, Task
from tests.support.trainer_service.same_training import Weights, assert_moved_alike

pytestmark = pytest.mark.numeric

GENTLE = step(0.05, eps=1.0)
"""With an epsilon of 1, a step is nearly one of gradient descent: there, rounding has a bound."""
GSPO = ForwardBackward(
    "gspo",
    {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0},
    tuple(random_datum(at, ("logprobs", "advantages", "sequence_ratio_mask"), 5 + at) for at in range(5)),
)
FIRST: Sequence[tuple[str, Command]] = [
    ("a", created(rank=4, seed=1)),
    ("b", created(rank=2, seed=2)),
    ("a", learn(*range(12))),
    ("b", GSPO),
    ("a", learn(13)),  # one rank has none
    ("a", GENTLE),
    ("b", GENTLE),
    ("a", SaveWeights("x")),
    ("c", LoadWeights("a", "x", True)),
    ("c", learn(3, 4, 5)),
    ("a", learn(6, forward_only=True)),
    ("c", GENTLE),
]
SECOND: Sequence[tuple[str, Command]] = [
    ("a", LoadWeights("a", "x", True)),
    *((model_id, command) for model_id in "abc" for command in (learn(7, 8), GENTLE)),
]


def log_of(run: Path) -> MemoryCommandLog:
    log: MemoryCommandLog = pickle.loads((run / LOG).read_bytes())  # noqa: S301 - the test's own
    return log


def weights_of(run: Path, model_id: str) -> Weights:
    weights: Weights = load_file(run / f"{model_id}.safetensors")
    return weights


def same_results(found: MemoryCommandLog, expected: MemoryCommandLog) -> None:
    assert found.results.keys() == expected.results.keys()
    for request_id in expected.results:
        same_result(found.last(request_id), expected.last(request_id))


def same_result(one: Result, other: Result) -> None:
    assert type(one) is type(other)
    if isinstance(one, Passed) and isinstance(other, Passed):
        assert one.metrics == pytest.approx(other.metrics, rel=ulps(512), abs=ulps(512, of=8))
        for mine, alone in zip(one.logprobs, other.logprobs, strict=True):
            assert list(mine) == pytest.approx(list(alone), rel=ulps(512))
    if isinstance(one, Stepped) and isinstance(other, Stepped):
        assert one.metrics == pytest.approx(other.metrics, rel=ulps(512))


@pytest.mark.parametrize("stage", cases([2], long=[0, 1]))
def test_two_ranks_carry_out_commands_as_one_does_also_after_a_restart_of_both_or_of_one(
    pair: RankPair, make_command_harness: MakeCommandHarness, tmp_path: Path, stage: int
) -> None:
    alone = make_command_harness("alone", zero_stage=stage)
    begun: dict[str, Weights] = {}
    for model_id, command in [*FIRST, *SECOND]:
        alone.send(model_id, command)
        if model_id not in begun:
            begun[model_id] = {name: each.clone() for name, each in alone.weights(model_id).items()}
    two, left = tmp_path / "two", tmp_path / "left"
    pair.learn(Task(two, make_command_harness("two", zero_stage=stage).settings, (), script=FIRST))
    shutil.copytree(two, left)
    after = make_command_harness("left", log_of(left), zero_stage=stage)
    for model_id, command in SECOND:
        after.send(model_id, command)
    pair.learn(Task(two, make_command_harness("two", zero_stage=stage).settings, (), script=SECOND))
    for log in (log_of(two), after.log):
        same_results(log, alone.log)
    for model_id, start in begun.items():
        for weights in (weights_of(two, model_id), after.weights(model_id)):
            assert_moved_alike(weights, alone.weights(model_id), start)
