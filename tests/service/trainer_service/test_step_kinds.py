"""Steps beside the plain one: with a critic, a controlled KL, a reference that moves, several mini-batches
or the most probable tokens of a teacher."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.long_cases import cases
from tests.support.tolerances import FLOAT64, ulps
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.random_rows import (
    POISON,
    VOCABULARY,
    MakeLearner,
    OneRankLearner,
    in_groups,
    random_rows,
    taught,
)
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    differs_by,
    same_metrics,
)
from trainer_service.algorithms.kl import adapted_coefficient
from trainer_service.model.logprob_head import sampled_logprobs
from trainer_service.rows.rows import Row, micro_batches
from trainer_service.step.step_parts import StepRequest, mini_batches
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

pytestmark = pytest.mark.numeric
CRITIC = {"optimizer": {"lr": 1e-2, "warmup_steps": 0}}
GENTLE = {"lr": 1e-4, "warmup_steps": 0}


def criticised(make_harness: MakeHarness, advantage: Any = "gae", **settings: Any) -> Harness:
    algorithm = {"advantage": advantage, "min_live_rows": 1} | settings.pop("algorithm", {})
    return make_harness(algorithm=algorithm, critic=CRITIC, optimizer=GENTLE, **settings).start()


def lesson(harness: Harness, name: str) -> dict[str, float]:
    """Good answers begin with token 10, bad ones with 11, so that the first token predicts the reward."""
    for index, (first, value) in enumerate(((10, 1.0), (11, 0.0)) * 2):
        output = [first, 20, 21, 1]
        harness.agents.episode(f"{name}-{index}", value, output_ids=output, version=harness.trainer.version)
    assert harness.trainer.run_once()
    return harness.told


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
def test_a_critic_learns_to_predict_rewards(name: str, make_harness: MakeHarness) -> None:
    harness = criticised(make_harness, name)
    said = [lesson(harness, f"l{step}") for step in range(8)]
    assert said[0]["critic/value_mean"] == 0.0  # before training, all values are 0
    assert said[-1]["critic/loss"] < 0.5 * said[0]["critic/loss"]
    assert all(math.isfinite(value) for metrics in said for value in metrics.values())
    if name == "gae":  # with turn_gae, a turn has the value that was computed before its first token
        assert said[-1]["critic/explained_variance"] > 0.3 > said[0]["critic/explained_variance"]


def over_restarts(make_harness: MakeHarness, steps: str, **settings: Any) -> list[dict[str, float]]:
    """The metrics of these steps. A trainer that starts again after each step has the same, and weights that
    are bitwise equal."""
    through, cut = (make_harness(name, **settings).start() for name in ("through", "cut"))
    said = []
    for name in steps:
        said.append(stepped(through, name))
        again = stepped(cut, name)
        timed = ("time", "seconds/", "tokens_per")
        assert {key: value for key, value in again.items() if not key.startswith(timed)} == {
            key: value for key, value in said[-1].items() if not key.startswith(timed)
        }
        cut = cut.restart()
    assert differs_by(through.weights(), cut.weights()) == 0
    if through.settings.critic is not None:
        critics = [harness.policy.critic.module.state_dict() for harness in (through, cut)]
        assert differs_by(*critics) == 0
    return said


def stepped(harness: Harness, group_id: str) -> dict[str, float]:
    harness.agents.group(group_id, [1.0, 0.0, 0.5], version=harness.trainer.version)
    assert harness.trainer.run_once()
    return dict(harness.told)


def test_a_restart_goes_on_with_the_same_critic(make_harness: MakeHarness) -> None:
    said = over_restarts(make_harness, "abc", algorithm={"advantage": "gae"}, critic=CRITIC, optimizer=GENTLE)
    assert said[0]["critic/loss"] != said[1]["critic/loss"] != said[2]["critic/loss"]


def test_a_trainer_with_a_critic_refuses_a_checkpoint_without_one(make_harness: MakeHarness) -> None:
    make_harness().start().step("g")
    with pytest.raises(Exception, match="it was trained without trainer"):
        criticised(make_harness)


def test_a_critic_learns_the_same_from_any_micro_batches(make_harness: MakeHarness) -> None:
    ends = []
    for max_tokens in (1, 10_000):
        harness = criticised(make_harness, name=f"run-{max_tokens}", algorithm={"max_tokens": max_tokens})
        lesson(harness, "a")
        ends.append(lesson(harness, "b"))
    names = ("critic/loss", "critic/grad_norm", "adv/std", "loss", "grad_norm")
    one, other = ({name: end[name] for name in names} for end in ends)
    assert one == same_metrics(other)


CONTROLLED: dict[str, Any] = {"estimator": "k2", "coefficient": 0.5, "target": 0.001, "horizon": 20}


@pytest.mark.parametrize(
    ("measured", "rollouts", "wanted"),
    [
        (6.0, 256, 0.1),  # at the target
        (6.6, 256, 0.1 * (1 + 0.1 * 0.0256)),  # 10 % above it
        (12.0, 256, 0.1 * (1 + 0.2 * 0.0256)),  # the error counts as 20 %
        (0.0, 256, 0.1 * (1 - 0.2 * 0.0256)),
        (5.4, 10_000, 0.1 * 0.9),
        (0.0, 10**6, 0.1 * 0.8),  # a step counts at most as the horizon
    ],
)
def test_the_coefficient_follows_the_controller(measured: float, rollouts: int, wanted: float) -> None:
    """Target 6 and horizon 10,000 are those of Ziegler et al. 2019."""
    found = adapted_coefficient(0.1, measured, target=6.0, horizon=10_000, rollouts=rollouts)
    assert found == pytest.approx(wanted, rel=ulps(8, unit=FLOAT64))


@given(
    st.floats(1e-6, 1e3), st.floats(0, 1e9), st.floats(1e-6, 1e3), st.floats(0.1, 1e6), st.integers(1, 10**6)
)
def test_a_coefficient_stays_above_0_and_moves_towards_the_target(
    coefficient: float, measured: float, target: float, horizon: float, rollouts: int
) -> None:
    found = adapted_coefficient(coefficient, measured, target=target, horizon=horizon, rollouts=rollouts)
    assert 0 < found < 2 * coefficient
    assert (found - coefficient) * (measured - target) >= 0


def test_a_restart_goes_on_with_the_same_coefficient(make_harness: MakeHarness) -> None:
    rate = {"lr": 1e-3, "warmup_steps": 0}
    first, second, third = over_restarts(make_harness, "abc", algorithm={"kl": CONTROLLED}, optimizer=rate)
    assert first["kl/reference"] == 0  # the weights are still those of the reference
    assert first["kl/coefficient"] == 0.5
    assert second["kl/coefficient"] == adapted_coefficient(0.5, 0.0, target=0.001, horizon=20, rollouts=3)
    assert second["kl/reference"] > 0.0012
    assert third["kl/coefficient"] == second["kl/coefficient"] * 1.03


def test_the_loss_has_the_coefficient_of_its_step(make_harness: MakeHarness) -> None:
    """In the first step the KL and its gradient are 0, so both runs have the same weights after it."""
    fixed = {"estimator": "k2", "coefficient": 0.5}
    controlled, still = (
        make_harness(name, algorithm={"kl": kl}, optimizer={"lr": 1e-2, "warmup_steps": 0}).start()
        for name, kl in (("controlled", CONTROLLED), ("still", fixed))
    )
    for harness in (controlled, still):
        stepped(harness, "a")
    one, other = stepped(controlled, "b"), stepped(still, "b")
    assert other["kl/coefficient"] == 0.5, "without a target it stays"
    assert one["kl/reference"] == other["kl/reference"] > 0.01
    wanted = (one["kl/coefficient"] - 0.5) * one["kl/reference"]
    assert one["loss"] - other["loss"] == pytest.approx(wanted, rel=1e-3)


MOVING: dict[str, Any] = {"kl": {"estimator": "k2", "coefficient": 0.1, "reference_every_steps": 2}}
FAST = {"lr": 1e-2, "warmup_steps": 0}


def of_reference(learner: OneRankLearner) -> torch.Tensor:
    (batch,) = micro_batches(random_rows(9, 3), 1000)
    return learner.policy.reference(batch)


def of_policy(learner: OneRankLearner) -> torch.Tensor:
    (batch,) = micro_batches(random_rows(9, 3), 1000)
    return learner.policy.logprobs(batch)[0].detach()


@pytest.mark.parametrize(
    "given", cases([{"zero_stage": 3}, {"dtype": "bfloat16"}], long=[{}, {"zero_stage": 0}]), ids=str
)
def test_a_moved_reference_is_the_policy_of_then(make_learner: MakeLearner, given: dict[str, Any]) -> None:
    learner = make_learner(algorithm=MOVING, optimizer=FAST, **given)
    base = of_policy(learner)
    assert torch.equal(of_reference(learner), base)
    learner.learn(1)
    assert torch.equal(of_reference(learner), base)
    learner.leader.move_reference()
    then = of_policy(learner)
    learner.learn(2)
    assert torch.equal(of_reference(learner), then)
    assert not torch.equal(then, base)
    assert not torch.equal(of_policy(learner), then)


@pytest.mark.parametrize(("saved", "read"), cases([(1, 1), (1, 3)], long=[(3, 1), (3, 3)]))
def test_a_checkpoint_brings_back_the_reference_at_any_stage(
    make_learner: MakeLearner, tmp_path: Path, saved: int, read: int
) -> None:
    before = make_learner(algorithm=MOVING, optimizer=FAST, zero_stage=saved)
    base = of_reference(before)
    checkpoints = Checkpoints(tmp_path / "c", 3)
    before.learn(0)  # without a step, DeepSpeed cannot convert a checkpoint
    saved_checkpoint(checkpoints, before.leader, RunState(step=1, version=1))
    before.learn(1)
    before.leader.move_reference()
    then = of_reference(before)
    before.learn(2)
    saved_checkpoint(checkpoints, before.leader, RunState(step=2, version=2))

    after = make_learner(algorithm=MOVING, optimizer=FAST, zero_stage=read)
    checkpoints.restore(after.leader)
    assert torch.equal(of_reference(after), then)
    told, again = before.learn(3), after.learn(3)
    assert again == (told if saved == read else same_metrics(told))
    checkpoints.load(after.leader, 1, 1.0)  # from before the reference moved
    assert torch.equal(of_reference(after), base)


def test_the_trainer_moves_it_every_n_steps_also_over_restarts(make_harness: MakeHarness) -> None:
    said = over_restarts(make_harness, "abcd", algorithm=MOVING, optimizer=FAST)
    distances = [each["kl/reference"] for each in said]
    assert distances[0] == distances[2] == 0
    assert min(distances[1], distances[3]) > 0


CLIP_LOW, CLIP_HIGH, DUAL_CLIP, CAP = 0.2, 0.28, 3.0, 2.0
HALVES: dict[str, Any] = {"mini_batches": 2, "epochs": 2, "max_tokens": 64}


@pytest.mark.parametrize(
    ("sizes", "count", "split"),
    [
        ([2, 3, 2, 1], 2, [[0, 1, 2, 3, 4], [5, 6, 7]]),
        ([2, 3, 2], 2, [[0, 1, 2, 3, 4], [5, 6]]),
        ([4, 4], 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([3], 8, [[0], [1], [2]]),
        ([3], 1, [[0, 1, 2]]),
    ],
)
def test_mini_batches_have_whole_groups_or_else_whole_rollouts(
    sizes: list[int], count: int, split: list[list[int]]
) -> None:
    assert [at.tolist() for at in mini_batches(in_groups(0, sizes), count)] == split


def test_the_branches_of_a_rollout_stay_in_one_mini_batch() -> None:
    rows = [replace(row, session_id=f"s{at // 3}") for at, row in enumerate(random_rows(0, 6))]
    assert [at.tolist() for at in mini_batches(rows, 4)] == [[0, 1, 2], [3, 4, 5]]


def plain_updates(model: Any, batches: list[list[Row]], epochs: int) -> list[float]:
    """Train the model in a plain loop, row by row. Returns the loss of each update."""

    def logprobs(row: Row) -> torch.Tensor:
        ids = torch.from_numpy(row.ids_L)
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, ids[1:, None])[:, 0][torch.from_numpy(row.mask_L)[1:] == 1]  # type: ignore[no-any-return]

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=WELL_CONDITIONED["lr"], betas=(0.9, 0.95), weight_decay=0.0
    )
    with torch.no_grad():
        begin = {row.session_id: logprobs(row) for batch in batches for row in batch}
    losses = []
    for _ in range(epochs):
        for batch in batches:
            tokens = sum(row.trained_tokens for row in batch)
            total = torch.zeros(())
            for row in batch:
                now_T, begin_T = logprobs(row), begin[row.session_id]
                weight_T = (begin_T - torch.from_numpy(row.logprobs_L[row.mask_L == 1])).exp().clamp(max=CAP)
                ratio_T, advantage = (now_T - begin_T).exp(), row.advantage
                loss_T = torch.maximum(
                    -ratio_T * advantage, -ratio_T.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage
                )
                if advantage < 0:
                    loss_T = loss_T.clamp(max=-DUAL_CLIP * advantage)
                total = total + (weight_T * loss_T).sum() / tokens
            optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), WELL_CONDITIONED["max_grad_norm"])
            optimizer.step()
            losses.append(float(total.detach()))
    return losses


def test_updates_are_those_of_a_plain_loop(
    make_learner: MakeLearner, untrained: Weights, model_path: Path
) -> None:
    """Two epochs over two mini-batches are four updates; *begin* is from before the first of them."""
    from transformers import AutoModelForCausalLM

    rows = in_groups(1, [2, 3, 2, 1])
    model = AutoModelForCausalLM.from_pretrained(model_path)
    losses = plain_updates(model, [rows[:5], rows[5:]], epochs=2)
    given = {"optimizer": WELL_CONDITIONED, "algorithm": HALVES}
    one = make_learner(**given)
    told = one.leader.optimise(StepRequest(rows, 0, one.settings.algorithm))
    assert told["loss"] == pytest.approx(sum(losses[:2]) / 2, abs=1e-6)
    assert_moved_alike(model.state_dict(), one.exported(), untrained)
    assert (
        max(float((model.state_dict()[name] - one.exported()[name]).abs().max()) for name in untrained) < 1e-6
    )


def test_a_mini_batch_learns_as_a_step_of_its_rows_alone(make_learner: MakeLearner) -> None:
    """The weights and the loss of an update do not depend on the rows of the other one. Two steps of one
    update each are the same as one step of two, if nothing depends on *begin*."""
    way = {"loss": "reinforce", "correction": "none", "masks": [], "aggregation": {"mode": "rollout_mean"}}
    rows = in_groups(2, [2, 3, 2, 1])
    joint = make_learner(algorithm=way | {"mini_batches": 2}, optimizer=WELL_CONDITIONED)
    apart = make_learner(algorithm=way, optimizer=WELL_CONDITIONED)
    told = joint.leader.optimise(StepRequest(rows, 0, joint.settings.algorithm))
    each = [
        apart.leader.optimise(StepRequest(part, 0, apart.settings.algorithm)) for part in (rows[:5], rows[5:])
    ]
    assert told["loss"] == pytest.approx(sum(one["loss"] for one in each) / 2, rel=1e-6)
    assert told["grad_norm"] == max(one["grad_norm"] for one in each)
    assert differs_by(joint.exported(), apart.exported()) == 0


def test_a_later_mini_batch_without_a_finite_gradient_ends_the_step(make_learner: MakeLearner) -> None:
    learner = make_learner(algorithm={"mini_batches": 2, "epochs": 2})
    rows = [*in_groups(1, [2, 2]), *(replace(row, session_id=f"p{row.session_id}") for row in poisoned())]
    told = learner.leader.optimise(StepRequest(rows, 0, learner.settings.algorithm))
    assert told["updates"] == 1
    assert not told["grad_norm"] < float("inf")


def poisoned() -> list[Row]:
    return [replace(row, group_id="p") for row in random_rows(2, 2, POISON)]


def test_a_critic_makes_as_many_updates_and_the_step_one_version(make_harness: MakeHarness) -> None:
    """Each update advances the schedules of both: after the two updates of the first step, both rates are
    0."""
    algorithm = {"advantage": "gae", "min_live_rows": 4, "mini_batches": 2}
    falling = {"lr": 1e-2, "warmup_steps": 0, "schedule": "linear", "total_steps": 2}
    harness = make_harness(algorithm=algorithm, critic={"optimizer": falling}, optimizer=falling).start()

    def weights() -> list[torch.Tensor]:
        modules = (harness.policy.module, harness.policy.critic.module)
        return [
            torch.cat([each.detach().flatten() for each in module.parameters()]).clone() for module in modules
        ]

    before = weights()
    said = lesson(harness, "a")
    after = weights()
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert said["critic/value_mean"] == 0.0  # the values are from before the first update
    assert said["early_frac"] == 0
    assert harness.trainer.version == 1
    lesson(harness, "b")
    assert all(torch.equal(*pair) for pair in zip(after, weights(), strict=True))


TOP_K = 3
FORWARD_KL: dict[str, Any] = {"loss": {"name": "forward_kl", "top_k": TOP_K}, "max_tokens": 64}
TEACHER = {"url": "http://teacher"}


def test_the_head_computes_log_p_of_several_targets_and_their_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((5, 8), (20, 8))
    )
    targets_TK = torch.randint(0, 20, (5, 4), generator=generator)
    targets_TK[:, 1] = targets_TK[:, 0]  # the sampled token may be among the most probable ones
    temperatures_T = torch.linspace(0.5, 1.5, 5).double()
    slope_TK = torch.randn((5, 4), generator=generator, dtype=torch.float64)
    ours_TK = sampled_logprobs(hidden, weight, None, targets_TK, temperatures_T)[:, :-1]
    plain_TK = ((hidden @ weight.T) / temperatures_T[:, None]).log_softmax(1).gather(1, targets_TK)
    torch.testing.assert_close(ours_TK, plain_TK)
    pairs = zip(
        torch.autograd.grad((ours_TK * slope_TK).sum(), (hidden, weight)),
        torch.autograd.grad((plain_TK * slope_TK).sum(), (hidden, weight)),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_a_pass_scores_the_tokens_of_each_place_in_any_packing(make_learner: MakeLearner) -> None:
    rows, policy = taught(1, 5, TOP_K), make_learner(algorithm=FORWARD_KL, teacher=TEACHER).policy
    (whole,) = micro_batches(rows, 1000)
    order = np.argsort(whole.rows_T, kind="stable")
    together = policy.scores(whole).top_TK
    assert together is not None
    apart = [policy.scores(batch).top_TK for row in rows for batch in micro_batches([row], 1)]
    torch.testing.assert_close(
        together.detach()[order], torch.cat([each.detach() for each in apart if each is not None])
    )


class TopTeacher:
    """A teacher that tells the same most probable tokens at each place."""

    def __init__(self, top: Any) -> None:
        self.top = top
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        asked = httpx.Response(200, content=request.content).json()
        self.asked.append(asked)
        ids = asked["input_ids"][asked["logprob_start_len"] :]
        own = [[None, ids[0], None], *([-1.0, token, None] for token in ids[1:])]
        told = {"input_token_logprobs": own, "input_top_logprobs": [None, *[self.top] * (len(ids) - 1)]}
        return httpx.Response(200, json={"meta_info": told})


def test_the_policy_takes_over_the_teachers_distribution(make_harness: MakeHarness) -> None:
    top = [[float(np.log(p)), token, None] for p, token in ((0.6, 40), (0.3, 41), (0.05, 42))]
    algorithm = FORWARD_KL | {"min_live_rows": 1, "max_staleness": 100}
    harness = make_harness(algorithm=algorithm, teacher=TEACHER, optimizer={"lr": 5e-2, "warmup_steps": 0})
    harness.teacher = teacher = TopTeacher(top)
    harness.start()
    losses = []
    for step in range(12):
        harness.agents.episode(f"s{step}", 0.0)
        assert harness.trainer.run_once()
        losses.append(harness.told["loss"])
    assert teacher.asked[0]["top_logprobs_num"] == TOP_K
    assert losses[-1] < 0.2 < 1 < losses[0]


def test_a_session_without_the_tokens_that_were_asked_is_invalid(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm=FORWARD_KL | {"min_live_rows": 1}, teacher=TEACHER)
    harness.teacher = teacher = TopTeacher([])
    harness.start()
    short = [None, [], [[-0.1, 5, None]]]
    strange = [
        [-0.1, "x", None],
        [-0.1, VOCABULARY, None],
        [-0.1, 2**40, None],
        ["nan", 5, None],
        [1e99, 5, None],
    ]
    for number, teacher.top in enumerate([*short, *([each] * 3 for each in strange)]):
        harness.agents.episode(f"s{number}", 0.0)
        assert not harness.trainer.run_once(), teacher.top
        verdict = harness.verdict(f"s{number}")
        assert verdict.code == "invalid", teacher.top
        assert "did not tell its 3 most probable tokens" in verdict.detail, teacher.top
