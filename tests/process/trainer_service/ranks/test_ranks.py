"""Two real ranks learn the same as a single rank, and both end if one of them dies."""

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.long_cases import cases
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.expert_models import made_experts
from tests.support.trainer_service.model_kinds import make_kind
from tests.support.trainer_service.random_rows import (
    POISON,
    MakeLearner,
    in_groups,
    random_rows,
    taught,
    with_experts,
)
from tests.support.trainer_service.rank_learning import learned_alike, saved_step, weights_of
from tests.support.trainer_service.rank_pair import DEEPSPEED, RankPair, rank_pair
from tests.support.trainer_service.rank_tasks import SYNCED, Task
from tests.support.trainer_service.related_rows import related_rows
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    differs_by,
)
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.rows.rows import Row
from trainer_service.step.step_parts import StepRequest
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState


@pytest.mark.parametrize("stage", cases([3], long=[0, 1, 2]))
def test_two_ranks_learn_in_parts_what_one_learns_at_once(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, stage: int
) -> None:
    # The third step has one row, so that one rank has none. The last step has an infinite gradient.
    steps = [random_rows(1, 5), random_rows(2, 8), random_rows(3, 1), random_rows(4, 5, POISON)]
    probes = [random_rows(5, 3), random_rows(5, 3, POISON), random_rows(6, 1)]
    _, (told,) = learned_alike(
        pair,
        make_learner,
        tmp_path / "two",
        steps,
        {},
        two={"zero_stage": stage},
        probes=probes,
        in_parts=True,
    )
    assert [len(each) for each in told.records] == [5, 8, 1, 0]
    assert told.metrics[-1]["grad_norm"] == float("inf")
    assert told.sound == [True, False, True]


def test_two_ranks_learn_from_shared_prefixes_what_one_learns_from_separate_rows(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    steps = [related_rows(roots=2, branches=1, tips=2, seed=seed) for seed in range(3)]
    both, one = {"algorithm": {"max_tokens": 150}}, {"share_prefixes": False}
    alone, (told,) = learned_alike(
        pair, make_learner, tmp_path / "two", steps, both, one=one, two={"zero_stage": 3}
    )
    for mine, of_one in zip(told.metrics, alone, strict=True):
        assert mine["computed_per_token"] < of_one["computed_per_token"] / 1.5


def test_two_ranks_of_a_model_that_gets_one_row_a_pass_learn_what_one_learns(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    make_kind("nemotron", tmp_path / "base")
    steps, both = [random_rows(seed, 5) for seed in (1, 2)], {"model_path": tmp_path / "base"}
    learned_alike(pair, make_learner, tmp_path / "two", steps, both, two={"zero_stage": 3})


@pytest.mark.parametrize("stage", cases([1], long=[3]))
def test_two_ranks_replay_and_balance_experts_as_one_does(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, stage: int
) -> None:
    made_experts("Qwen3Moe", tmp_path / "base")
    both = {
        "model_path": tmp_path / "base",
        "router_replay": True,
        "algorithm": {"router_aux_loss": 0.5, "max_tokens": 60},
    }
    steps = [with_experts(random_rows(1, 7))]
    (alone,), _ = learned_alike(pair, make_learner, tmp_path / "two", steps, both, two={"zero_stage": stage})
    assert {"router/aux_loss", "router/load_max", "router/replayed"} <= alone.keys()


KINDS: dict[str, dict[str, Any]] = {
    "critic, moving reference": {
        "critic": {"optimizer": WELL_CONDITIONED},
        "algorithm": {"advantage": "gae", "kl": {"coefficient": 0.1, "reference_every_steps": 2}},
    },
    "adapters": {"lora": {"rank": 4}, "algorithm": {"advantage": "drgrpo", "kl": {"coefficient": 0.1}}},
    "moving reference alone": {
        "algorithm": {"kl": {"estimator": "k2", "coefficient": 0.1, "reference_every_steps": 2}}
    },
}


@pytest.mark.parametrize(
    ("kind", "stage"),
    cases(
        [("critic, moving reference", 3), ("adapters", 3)],
        long=[("critic, moving reference", 1), ("moving reference alone", 1), ("moving reference alone", 3)],
    ),
)
def test_ranks_with_parts_of_several_models_learn_what_one_with_whole_models_learns(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, kind: str, stage: int
) -> None:
    """The third step goes on from the checkpoint of the others, in new processes."""
    steps = [[replace(row, rewards_L=row.mask_L * 1.0) for row in random_rows(seed, 5)] for seed in range(3)]
    given = KINDS[kind] | {"algorithm": {"max_tokens": 64} | KINDS[kind]["algorithm"]}
    one, two = {"zero_stage": 1}, {"zero_stage": stage}
    learned_alike(pair, make_learner, tmp_path / "run", steps, given, one=one, two=two, cuts=[2])


@pytest.mark.parametrize("stage", cases([3], long=[1]))
@pytest.mark.numeric
def test_two_ranks_make_the_updates_of_mini_batches_as_one_does(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, stage: int
) -> None:
    """Two epochs over two mini-batches are four updates."""
    both = {"algorithm": {"mini_batches": 2, "epochs": 2, "max_tokens": 64}}
    steps = [in_groups(1, [2, 3, 2, 1])]
    learned_alike(pair, make_learner, tmp_path / "two", steps, both, two={"zero_stage": stage})


@pytest.mark.parametrize(("stage", "sliced"), cases([(1, 2)], long=[(1, 1), (3, 1)]))
@pytest.mark.numeric
def test_two_ranks_learn_from_a_teachers_tokens_what_one_learns(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, stage: int, sliced: int
) -> None:
    both: dict[str, Any] = {
        "algorithm": {"loss": {"name": "forward_kl", "top_k": 3}, "max_tokens": 64},
        "teacher": {"url": "http://teacher"},
    }
    steps, two = [taught(1, 6, 3), taught(2, 1, 3)], {"zero_stage": stage}
    learned_alike(pair, make_learner, tmp_path / "two", steps, both, two=two, sliced=sliced)


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


@pytest.mark.parametrize("stage", cases([3], long=[1]))
def test_a_checkpoint_goes_on_with_fewer_and_with_more_ranks(
    pair: RankPair, make_learner: MakeLearner, untrained: Weights, tmp_path: Path, stage: int
) -> None:
    one = make_learner(optimizer=WELL_CONDITIONED)
    other = make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED)
    run, steps = tmp_path / "run", [random_rows(seed, 6) for seed in range(3)]
    pair.learn(Task(run, other.settings, steps[:1]))
    assert_rank_1_synced_its_shards(run)
    checkpoints = Checkpoints(run / "checkpoints", 2)
    checkpoints.restore(other.leader)
    assert differs_by(other.exported(), weights_of(run)) == 0
    other.leader.optimise(StepRequest(steps[1], 0, other.settings.algorithm))
    saved_checkpoint(checkpoints, other.leader, RunState(step=2))
    pair.learn(Task(run, other.settings, steps))
    for each in steps:
        one.leader.optimise(StepRequest(each, 0, one.settings.algorithm))
    assert_moved_alike(one.exported(), weights_of(run), untrained)


def assert_rank_1_synced_its_shards(run: Path) -> None:
    """Rank 0 may be on another host, where a sync does nothing for the files of this one."""
    (checkpoint,) = (run / "checkpoints").glob("*-step-*")
    own = {path.name for path in checkpoint.glob("*_rank_1_*")}
    assert own
    assert own <= set((run / SYNCED).read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("stage", cases([3], long=[1]))
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


def test_a_rank_that_waits_takes_no_cpu_time_and_when_it_is_silent_the_other_ends(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    """A rollout takes minutes. A rank that waits busily would take a core from the engine."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "rest").touch()
    settings = make_learner(rank_timeout_s=8).settings
    told = pair.begin(Task(run, settings, [random_rows(1, 5)], may_fail=True))
    wait_until((run / "idle").exists, PATIENCE_S)
    leader, follower = pair.ranks(told)
    before = follower.cpu_times()
    time.sleep(3)  # the test measures how much CPU time the rank uses meanwhile
    after = follower.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.5
    follower.suspend()
    wait_until(lambda: not leader.is_running(), PATIENCE_S)
    follower.kill()
    assert pair.ended(told) == [1, -signal.SIGKILL]


# With everything on that large models need, ranks and restarts change what is learned by rounding only


COMMON: dict[str, Any] = {
    "optimizer": WELL_CONDITIONED,
    "critic": {"optimizer": WELL_CONDITIONED},
    "algorithm": {
        "advantage": "gae",
        "kl": {"coefficient": 0.1, "reference_every_steps": 2},
        "mini_batches": 2,
        "epochs": 2,
        "max_tokens": 150,
    },
}
"""What both trainings compute."""
ON: dict[str, Any] = {"zero_stage": 3, "activation_checkpointing": True}
OFF: dict[str, Any] = {"zero_stage": 1, "activation_checkpointing": False, "share_prefixes": False}
STEPS = 4


def groups(step: int) -> list[Row]:
    """The rows of two groups, whose members share prefixes."""
    rows = related_rows(roots=2, branches=1, tips=3, seed=step)
    return [replace(row, group_id=str(tuple(row.ids_L[:4]))) for row in rows]


def learned(
    pair: RankPair,
    make_learner: MakeLearner,
    folder: Path,
    steps: list[list[Row]],
    both: dict[str, Any],
    on: dict[str, Any],
    sliced: int = 1,
) -> None:
    """Train on one rank with everything off, on two with everything on, and on two that restart after each
    step; assert that the first two learn alike, and the last two the same."""
    metrics = {}
    for name, cuts in {"straight": (), "cut": range(1, STEPS)}.items():
        given: dict[str, Any] = {"one": OFF, "two": ON | on, "sliced": sliced, "cuts": cuts}
        _, told = learned_alike(pair, make_learner, folder / name, steps, COMMON | both, **given)
        metrics[name] = [each for part in told for each in part.metrics]
    assert metrics["cut"] == metrics["straight"]
    assert differs_by(weights_of(folder / "straight"), weights_of(folder / "cut")) == 0


@pytest.mark.long
@pytest.mark.numeric
@pytest.mark.parametrize("sliced", [1, 2])
def test_two_ranks_that_restart_learn_what_one_learns(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, sliced: int
) -> None:
    steps = [groups(step) for step in range(STEPS)]
    learned(pair, make_learner, tmp_path, steps, {}, {"share_prefixes": True}, sliced)


@pytest.mark.long
@pytest.mark.numeric
def test_a_mixture_of_experts_as_well(pair: RankPair, make_learner: MakeLearner, tmp_path: Path) -> None:
    made_experts("Qwen3Moe", tmp_path / "base")
    steps = [with_experts(groups(step)) for step in range(STEPS)]
    both = {"model_path": tmp_path / "base", "router_replay": True}
    learned(pair, make_learner, tmp_path, steps, both, {})
