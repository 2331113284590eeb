"""Two real ranks learn the same as a single rank, and both end if one of them dies."""

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.expert_models import made_experts
from tests.support.trainer_service.random_rows import POISON, MakeLearner, random_rows, with_experts
from tests.support.trainer_service.rank_pair import DEEPSPEED, RankPair, rank_pair
from tests.support.trainer_service.rank_tasks import SYNCED, Task
from tests.support.trainer_service.recorded import assert_same_records
from tests.support.trainer_service.related_rows import related_rows
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    differs_by,
    same_metrics,
)
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.step.step_request import StepRequest
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState


def weights_of(run: Path) -> Weights:
    weights: Weights = load_file(run / "weights.safetensors")
    return weights


@pytest.mark.numeric
def test_each_rank_makes_its_own_shards_durable(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    """Rank 0 may be on another host, where a sync does nothing for the files of this one."""
    task = Task(tmp_path / "run", make_learner().settings, [random_rows(1, 5)])
    pair.learn(task)
    (checkpoint,) = (task.run / "checkpoints").glob("*-step-*")
    own = {path.name for path in checkpoint.glob("*_rank_1_*")}
    assert own
    assert own <= set((task.run / SYNCED).read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_two_ranks_learn_in_parts_what_one_learns_at_once(
    pair: RankPair, make_learner: MakeLearner, untrained: Weights, tmp_path: Path, stage: int
) -> None:
    # The third step has one row, so that one rank has none. The last step has an infinite gradient.
    steps = [random_rows(1, 5), random_rows(2, 8), random_rows(3, 1), random_rows(4, 5, POISON)]
    probes = [random_rows(5, 3), random_rows(5, 3, POISON), random_rows(6, 1)]
    one = make_learner(optimizer=WELL_CONDITIONED)
    of_one, records = [], []
    for each in steps:
        of_one.append(one.leader.optimise(StepRequest(each, 0, one.settings.algorithm, recorded="all")))
        records.append(one.leader.records)
    settings = make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED).settings
    of_two = pair.learn(Task(tmp_path / "two", settings, steps, probes, in_parts=True))
    assert_moved_alike(weights_of(tmp_path / "two"), one.exported(), untrained)
    for told_alone, told in zip(of_one, of_two.metrics, strict=True):
        assert told == same_metrics(told_alone), "rank 0 reports the metrics of all rows"
    for mine, theirs in zip(of_two.records, records, strict=True):
        assert_same_records(mine, theirs)
    assert [len(each) for each in of_two.records] == [5, 8, 1, 0]
    assert of_two.metrics[-1]["grad_norm"] == float("inf")
    assert of_two.sound == [True, False, True]


def test_two_ranks_learn_from_shared_prefixes_what_one_learns_from_separate_rows(
    pair: RankPair, make_learner: MakeLearner, untrained: Weights, tmp_path: Path
) -> None:
    steps = [related_rows(roots=2, branches=1, tips=2, seed=seed) for seed in range(3)]
    common = {"optimizer": WELL_CONDITIONED, "algorithm": {"max_tokens": 150}}
    one = make_learner(share_prefixes=False, **common)
    alone = [one.leader.optimise(StepRequest(each, 0, one.settings.algorithm)) for each in steps]
    settings = make_learner(zero_stage=3, **common).settings
    both = pair.learn(Task(tmp_path / "two", settings, steps)).metrics
    for told, of_one in zip(both, alone, strict=True):
        assert told.pop("computed_per_token") < of_one.pop("computed_per_token") / 1.5
        assert told == same_metrics(of_one)
    assert_moved_alike(weights_of(tmp_path / "two"), one.exported(), untrained)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_two_ranks_replay_and_balance_experts_as_one_does(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, stage: int
) -> None:
    untrained = made_experts("Qwen3Moe", tmp_path / "base")
    rows = with_experts(random_rows(1, 7))
    given = {
        "model_path": tmp_path / "base",
        "router_replay": True,
        "optimizer": WELL_CONDITIONED,
        "algorithm": {"router_aux_loss": 0.5, "max_tokens": 60},
    }
    one = make_learner(**given)
    of_one = one.leader.optimise(StepRequest(rows, 0, one.settings.algorithm))
    settings = make_learner(**given, zero_stage=stage).settings
    of_two = pair.learn(Task(tmp_path / "two", settings, [rows]))
    assert {"router/aux_loss", "router/load_max", "router/replayed"} <= of_one.keys()
    assert of_two.metrics == [same_metrics(of_one)]
    assert_moved_alike(weights_of(tmp_path / "two"), one.exported(), untrained)


@pytest.mark.long
def test_two_ranks_that_share_their_devices_learn_the_same(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    steps, shared = (
        [random_rows(seed, 5) for seed in range(3)],
        {"memory": "shared", "shared_with": ["http://e"]},
    )
    own = pair.learn(Task(tmp_path / "own", make_learner(zero_stage=2).settings, steps))
    of_shared = pair.learn(Task(tmp_path / "shared", make_learner(zero_stage=2, **shared).settings, steps))
    assert of_shared.metrics == own.metrics
    assert differs_by(weights_of(tmp_path / "shared"), weights_of(tmp_path / "own")) == 0


@pytest.mark.long
def test_the_launcher_of_deepspeed_starts_the_same_ranks(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    settings, steps = make_learner(optimizer=WELL_CONDITIONED).settings, [random_rows(1, 5)]
    by_torch = pair.learn(Task(tmp_path / "torch", settings, steps))
    with rank_pair(tmp_path / "tasks", DEEPSPEED) as other_pair:
        by_deepspeed = other_pair.learn(Task(tmp_path / "deepspeed", settings, steps))
        assert other_pair.close() == 0
    assert by_deepspeed.metrics == by_torch.metrics
    assert differs_by(weights_of(tmp_path / "deepspeed"), weights_of(tmp_path / "torch")) == 0


@pytest.mark.parametrize(
    "given", [{"critic": {"optimizer": WELL_CONDITIONED}}, {"lora": {"rank": 4}}], ids=["critic", "adapters"]
)
def test_ranks_with_parts_of_several_models_learn_what_one_with_whole_models_learns(
    pair: RankPair, make_learner: MakeLearner, untrained: Weights, tmp_path: Path, given: dict[str, Any]
) -> None:
    """The second task goes on from the checkpoint of the first."""
    advantage = "gae" if "critic" in given else "drgrpo"
    algorithm = {"max_tokens": 64, "advantage": advantage, "kl": {"coefficient": 0.1}}
    made = given | {"algorithm": algorithm, "optimizer": WELL_CONDITIONED}
    steps = [[replace(row, rewards_L=row.mask_L * 1.0) for row in random_rows(seed, 5)] for seed in range(2)]
    one = make_learner(zero_stage=1, **made)
    of_one = [one.leader.optimise(StepRequest(each, 0, one.settings.algorithm)) for each in steps]
    settings, run = make_learner(zero_stage=3, **made).settings, tmp_path / "run"
    of_two = [pair.learn(Task(run, settings, steps[:count])).metrics[-1] for count in (1, 2)]
    assert_moved_alike(weights_of(run), one.exported(), untrained)
    for told_alone, told in zip(of_one, of_two, strict=True):
        assert told == same_metrics(told_alone)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_checkpoint_goes_on_with_fewer_and_with_more_ranks(
    pair: RankPair, make_learner: MakeLearner, untrained: Weights, tmp_path: Path, stage: int
) -> None:
    one = make_learner(optimizer=WELL_CONDITIONED)
    other = make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED)
    run, steps = tmp_path / "run", [random_rows(seed, 6) for seed in range(3)]
    pair.learn(Task(run, other.settings, steps[:1]))
    checkpoints = Checkpoints(run / "checkpoints", 2)
    checkpoints.restore(other.leader)
    assert differs_by(other.exported(), weights_of(run)) == 0
    other.leader.optimise(StepRequest(steps[1], 0, other.settings.algorithm))
    saved_checkpoint(checkpoints, other.leader, RunState(step=2))
    pair.learn(Task(run, other.settings, steps))
    for each in steps:
        one.leader.optimise(StepRequest(each, 0, one.settings.algorithm))
    assert_moved_alike(one.exported(), weights_of(run), untrained)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_when_one_rank_dies_the_other_ends_by_itself_and_the_next_start_goes_on_bitwise(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, stage: int
) -> None:
    settings = make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED).settings
    rows = [random_rows(seed, 8) for seed in range(8)]
    steps = [rows[step % len(rows)] for step in range(2000)]  # more than there is time for
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    told = pair.begin(Task(killed, settings, steps, may_fail=True))
    wait_until(lambda: saved_step(killed) >= 2)
    pair.ranks(told)[1].kill()
    assert pair.ended(told) == [1, -signal.SIGKILL]
    assert not told.exists()
    enough = steps[: saved_step(killed) + 2]
    resumed = pair.learn(Task(killed, settings, enough))
    assert len(resumed.metrics) == 2
    uninterrupted = pair.learn(Task(straight, settings, enough))
    assert resumed.metrics == uninterrupted.metrics[-2:]
    assert differs_by(weights_of(killed), weights_of(straight)) == 0


def test_when_one_rank_is_silent_the_other_ends_though_nothing_is_to_be_trained(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "rest").touch()
    settings = make_learner(rank_timeout_s=8).settings
    told = pair.begin(Task(run, settings, [random_rows(1, 5)], may_fail=True))
    wait_until((run / "idle").exists, PATIENCE_S)
    leader, follower = pair.ranks(told)
    follower.suspend()
    wait_until(lambda: not leader.is_running(), PATIENCE_S)
    follower.kill()
    assert pair.ended(told) == [1, -signal.SIGKILL]


def test_a_rank_without_commands_takes_no_cpu_time(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    """A rollout takes minutes. A rank that waits busily would take a core from the engine."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "rest").touch()
    told = pair.begin(Task(run, make_learner().settings, [random_rows(1, 5)]))
    wait_until((run / "idle").exists)
    follower = pair.ranks(told)[1]
    before = follower.cpu_times()
    time.sleep(3)  # the test measures how much CPU time the rank uses meanwhile
    after = follower.cpu_times()
    (run / "rest").unlink()
    pair.end(told)
    assert after.user + after.system - before.user - before.system < 0.5


def saved_step(run: Path) -> int:
    current = run / "checkpoints" / "CURRENT"
    return int(current.read_text().rpartition("-")[2]) if current.exists() else 0
