"""From rewards to advantages, against golden values that published implementations agree with.

Test ids are the cases' names in algorithms_golden.json. A row of the case is a rollout of its own, unless the
case says that it is scored at the level of rollouts.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from gateway.callers.backpressure import StalenessBudget, TrainerBacklog
from rollout_queue.contract.packed_tokens import TokenIds
from tests.support.trainer_service.canonical import CASES, INPUTS, MASK, ROWS_T, close, given
from tests.support.trainer_service.harness import turn
from tests.support.trainer_service.made_rows import rows_of
from trainer_service.algorithms.advantages import Advantage, Rae
from trainer_service.algorithms.returns import Returns, TokenRewards, kl_in_reward, turn_discount, value_loss
from trainer_service.algorithms.rollouts import (
    LengthPenalty,
    Overlong,
    Rollout,
    Rollouts,
    ShapingSettings,
    groups_without_signal,
    shaped,
)
from trainer_service.step.diagnostics import staleness

pytestmark = pytest.mark.numeric

LENGTHS = MASK.sum(1).tolist()
FAMILIES = ("adv.", "filter.", "reward.", "critic.", "async.", "trajectory.", "mini.group_")

LONE = 8
"""The row that is alone in its group. The trainer gives it an advantage of 0. verl gives it its raw reward,
and two of the cases follow verl."""
RAW_WHERE_ALONE = {"adv.opo", "adv.gpg"}

settings_of: Callable[[Any], Any] = TypeAdapter(Advantage).validate_python


def expected(case: str, name: str) -> Tensor:
    values = torch.tensor(CASES[case]["expected"][name], dtype=torch.float64)
    return values[MASK] if values.shape == MASK.shape else values


def by_row() -> Rollouts:
    """Nine rollouts of one row each."""
    second = CASES["adv.gdpo"]["params"]["reward2"]
    return Rollouts(
        tuple(
            Rollout(
                rollout_id=f"row {row}",
                group_id=str(INPUTS["group_id"][row]),
                reward=INPUTS["reward"][row],
                output_tokens=LENGTHS[row],
                parts={"first": INPUTS["reward"][row], "second": second[row]},
            )
            for row in range(9)
        )
    )


def by_rollout() -> tuple[Rollouts, Tensor]:
    """Eight rollouts, one of which has two rows; and the rollout of each row."""
    ids = list(dict.fromkeys(INPUTS["rollout_id"]))
    members = tuple(
        Rollout(
            rollout_id=each,
            group_id=str(INPUTS["group_id"][INPUTS["rollout_id"].index(each)]),
            reward=INPUTS["reward"][INPUTS["rollout_id"].index(each)],
        )
        for each in ids
    )
    return Rollouts(members), torch.tensor([ids.index(each) for each in INPUTS["rollout_id"]])


def score(chosen: Any, rollouts: Rollouts) -> Tensor:
    scored: Tensor = settings_of(chosen).score(rollouts)
    return scored


PER_ROW = {
    "adv.grpo_ddof1": "grpo_ddof1",
    "adv.grpo_ddof0": "grpo_ddof0",
    "adv.drgrpo": "drgrpo",
    "adv.rloo": "rloo",
    "adv.liteppo_group_mean_batch_std": "liteppo",
    "adv.opo": "opo",
    "adv.gpg": "gpg",
    "adv.maxrl": "maxrl",
    "adv.passk": "passk",
}


@pytest.mark.parametrize("case", PER_ROW)
def test_advantage(case: str) -> None:
    wanted = expected(case, "adv")
    if case in RAW_WHERE_ALONE:
        wanted[LONE] = 0.0
    got = score(PER_ROW[case], by_row())
    assert close(got, wanted)
    assert got[LONE] == 0


PER_ROLLOUT = {"adv.grpo_rollout_level_ddof1": "grpo_ddof1", "adv.drgrpo_rollout_level": "drgrpo"}


@pytest.mark.parametrize("case", PER_ROLLOUT)
def test_advantage_of_rollouts(case: str) -> None:
    rollouts, rollout_R = by_rollout()
    chosen = settings_of(PER_ROLLOUT[case])
    tokens_T = chosen.to_tokens(score(chosen, rollouts), rollout_R, ROWS_T)
    assert close(tokens_T, expected(case, "adv")[ROWS_T])


@pytest.mark.parametrize("case", ["adv.gdpo"])
def test_parts(case: str) -> None:
    first, second = CASES[case]["params"]["weights"]
    chosen = settings_of({"name": "gdpo", "weights": {"first": first, "second": second}})
    tokens_T = chosen.to_tokens(score(chosen, by_row()), torch.arange(9), ROWS_T)
    assert close(tokens_T, expected(case, "adv_tokens"))


@pytest.mark.parametrize("case", ["adv.reinforce_pp_baseline"])
def test_baseline(case: str) -> None:
    for whiten, name in ((False, "unwhitened"), (True, "adv_tokens")):
        chosen = settings_of({"name": "reinforce_pp_baseline", "whiten": whiten})
        tokens_T = chosen.to_tokens(score(chosen, by_row()), torch.arange(9), ROWS_T)
        assert close(tokens_T, expected(case, name))


@pytest.mark.parametrize("case", ["adv.rae"])
def test_memory(case: str) -> None:
    params = CASES[case]["params"]
    pairs = zip(params["agents"], params["rewards"], strict=True)
    members = [
        Rollout(rollout_id=str(number), group_id=str(number), reward=reward, agent=agent)
        for number, (agent, reward) in enumerate(pairs)
    ]
    chosen, got = Rae(decay=params["decay"]), []
    baselines: dict[str, float] = {}
    for batch in (members[:2], members[2:5], members[5:]):  # baselines continue over batches
        rollouts = Rollouts(tuple(batch), baselines)
        got += score(chosen, rollouts).tolist()
        baselines = chosen.baselines_after(rollouts)
    assert close(got, expected(case, "adv"))
    assert baselines == pytest.approx(CASES[case]["expected"]["baselines"])


def returns(chosen: dict[str, Any], **more: Any) -> Returns:
    fields: dict[str, Any] = {"rewards_T": given("tok_reward"), "rows_T": ROWS_T}
    found: Returns = settings_of(chosen).estimate(TokenRewards(**(fields | more)))
    return found


@pytest.mark.parametrize("case", ["adv.reinforce_pp_g1", "adv.reinforce_pp_g0.9"])
def test_rewards_to_go(case: str) -> None:
    got = returns({"name": "reinforce_pp", "gamma": CASES[case]["params"]["gamma"]})
    assert close(got.returns_T, expected(case, "returns"))
    assert close(got.advantages_T, expected(case, "adv_tokens"))


@pytest.mark.parametrize("case", ["adv.gae_g1.0_l1.0", "adv.gae_g0.99_l0.95"])
def test_gae(case: str) -> None:
    params = CASES[case]["params"]
    chosen = {"name": "gae", "gamma": params["gamma"], "lam": params["lam"]}
    plain = returns(chosen | {"whiten": False}, values_T=given("values"))
    assert close(plain.advantages_T, expected(case, "adv_tokens"))
    white = returns(chosen, values_T=given("values"))
    assert close(white.advantages_T, expected(case, "adv_whitened"))
    for got in (plain, white):
        assert close(got.returns_T, expected(case, "returns"))


@pytest.mark.parametrize("case", ["adv.turn_gae"])
def test_turns(case: str) -> None:
    """Turns of one, three and two tokens. A turn has its first token's value and the sum of its rewards."""
    params, advantages = CASES[case]["params"], CASES[case]["expected"]["adv"]
    first, second, third = params["turn_values"]
    got = returns(
        {"name": "turn_gae", "gamma": params["gamma"], "lam": params["lam"], "whiten": False},
        rewards_T=torch.tensor([params["turn_rewards"][0], -0.5, 0.0, 0.5, 0.75, 0.25]),
        values_T=torch.tensor([first, second, 9.0, 9.0, third, 9.0]),
        turns_T=torch.tensor([3, 4, 4, 4, 5, 5]),
        rows_T=torch.zeros(6, dtype=torch.int64),
    )
    assert close(got.advantages_T, [advantages[at] for at in (0, 1, 1, 1, 2, 2)])
    worth = [advantage + value for advantage, value in zip(advantages, params["turn_values"], strict=True)]
    assert close(got.returns_T, [worth[at] for at in (0, 1, 1, 1, 2, 2)])


@pytest.mark.parametrize("case", ["adv.turn_discount"])
def test_turn_discount(case: str) -> None:
    params = CASES[case]["params"]
    assert close(turn_discount(params["rewards"], discount=params["discount"]), expected(case, "rewards"))


@pytest.mark.parametrize("case", ["adv.overlong_dapo"])
def test_overlong(case: str) -> None:
    params = CASES[case]["params"]
    rollouts = [Rollout(str(n), "g", 1.0, output_tokens=n) for n in params["lengths"]]
    limit = Overlong(**{name: params[name] for name in ("max_len", "cache", "factor")})
    rewards = [each.reward - 1 for each in shaped(rollouts, ShapingSettings(overlong=limit))]
    assert close(rewards, expected(case, "penalty"))


@pytest.mark.parametrize("case", ["adv.length_penalty_linear"])
def test_length_penalty(case: str) -> None:
    params = CASES[case]["params"]
    columns = zip(params["reward"], params["out"], params["inp"], params["turns"], strict=True)
    rollouts = [
        Rollout(str(number), "g", reward, output_tokens=out, input_tokens=inp, turns=turns)
        for number, (reward, out, inp, turns) in enumerate(columns)
    ]
    out, inp, turns = params["weights"]
    weights = LengthPenalty(output_tokens=out, input_tokens=inp, turns=turns)
    got = shaped(rollouts, ShapingSettings(length_penalty=weights))
    assert close([each.reward for each in got], expected(case, "shaped"))
    assert close(score("drgrpo", Rollouts(got)), expected(case, "adv"))


@pytest.mark.parametrize("case", ["filter.zero_variance_groups"])
def test_filter(case: str) -> None:
    silent = groups_without_signal(by_row(), tolerance=CASES[case]["params"]["tol"])
    keep = {str(group): float(str(group) not in silent) for group in INPUTS["group_id"]}
    assert keep == CASES[case]["expected"]["keep_by_group"]


@pytest.mark.parametrize("case", ["reward.kl_in_reward_k1"])
def test_kl_in_reward(case: str) -> None:
    beta = CASES[case]["params"]["beta"]
    got = kl_in_reward(given("tok_reward"), given("lp_prox"), given("lp_ref"), beta=beta)
    assert close(got, expected(case, "tok_reward"))


@pytest.mark.parametrize("case", ["critic.value_clip"])
def test_critic(case: str) -> None:
    targets_T = returns({"name": "gae"}, values_T=given("v_old")).returns_T
    values_T = given("values").requires_grad_()
    found = value_loss(
        values_T,
        given("v_old"),
        targets_T,
        tokens_in_step=int(MASK.sum()),
        clip=CASES[case]["params"]["clip"],
    )
    assert close(found.loss.detach(), CASES[case]["expected"]["loss"])
    assert close(found.clipped_T.double().mean(), CASES[case]["expected"]["clip_frac"])
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert values_T.grad is not None
    errors_T = (values_T.detach() - targets_T) / int(MASK.sum())
    assert close(values_T.grad, torch.where(found.clipped_T, torch.zeros_like(errors_T), errors_T))


def room(versions: int, rollouts_per_step: int) -> int:
    """How many rollouts may be ahead of a new one at the gateway, if the engines serve the newest version."""
    reported = TrainerBacklog(
        version=0, rollouts_waiting=0, rollouts_owed=0, rollouts_per_step=rollouts_per_step, last_seen=0.0
    )
    return StalenessBudget(versions=versions, trainer=reported, serving=0).room


@pytest.mark.parametrize("case", ["async.areal_capacity"])
def test_capacity(case: str) -> None:
    """AReaL counts all rollouts since version 0. The gateway counts those that no step has trained."""
    got = []
    for versions, version, accepted, running, batch, max_concurrent in CASES[case]["params"]["rows"]:
        ahead = accepted + running - version * batch
        got.append(max(0, min(max_concurrent - running, room(versions, batch) - ahead)))
    assert got == CASES[case]["expected"]["capacity"]


@pytest.mark.parametrize("case", ["async.verl_rollout_num"])
def test_rollout_number(case: str) -> None:
    """verl limits the share of stale rollouts, and pushes every `sync_steps` steps. The test converts this
    limit to versions."""
    got = []
    for share, sync_steps, batches, mini_batch, stale in CASES[case]["params"]["rows"]:
        versions = (1 + share) * sync_steps - 1
        assert versions == int(versions)
        got.append(room(int(versions), batches * mini_batch) - stale)
    assert got == CASES[case]["expected"]["rollout_num"]


@pytest.mark.parametrize("case", ["async.prime_staleness"])
def test_staleness(case: str) -> None:
    rows = CASES[case]["params"]["rows"]
    got = [
        [int(each_R) for each_R in staleness(step - 1, torch.tensor([first]), torch.tensor([last]))]
        for step, first, last in rows
    ]
    assert got == CASES[case]["expected"]["staleness"]


@pytest.mark.parametrize("case", ["mini.group_1001"])
def test_group(case: str) -> None:
    for name, wanted in CASES[case]["expected"].items():
        # The case's values of pass@k are for [1, 0, 0, .5]. Its own rewards have two best, so nobody leads.
        rewards = [1.0, 0.0, 0.0, 0.5] if name == "passk" else CASES[case]["params"]["reward"]
        members = tuple(Rollout(str(number), "g", reward) for number, reward in enumerate(rewards))
        assert close(score(name, Rollouts(members)), wanted), name


@pytest.mark.parametrize("case", ["trajectory.exact_prefix_merge"])
def test_trajectory(case: str) -> None:
    """A turn continues the latest one that its prompt begins with, token by token."""
    turns: list[Any] = []
    wholes: list[list[int]] = []
    for number, each in enumerate(CASES[case]["params"]["turns"]):
        begun = [at for at, whole in enumerate(wholes) if each["prompt"][: len(whole)] == whole]
        known = len(wholes[begun[-1]]) if begun else 0
        turns.append(
            turn(
                turn_id=f"t{number}",
                parent_id=f"t{begun[-1]}" if begun else None,
                context_ids=TokenIds(each["prompt"][known:]),
                output_ids=each["output"],
                logprobs=each["logprobs"],
                started_at=100.0 + number,
            )
        )
        wholes.append([*each["prompt"], *each["output"]])
    rows = rows_of("s1", turns, [each.turn_id for each in turns])
    for row, wanted in zip(rows, CASES[case]["expected"]["rows"], strict=True):
        assert (row.ids_L.tolist(), row.mask_L.tolist()) == (wanted["ids"], wanted["mask"])
        assert close(row.logprobs_L, wanted["lp"])


def test_every_case_of_the_family_has_a_test() -> None:
    functions: list[Any] = [each for name, each in globals().items() if name.startswith("test_")]
    marks = [mark for each in functions for mark in getattr(each, "pytestmark", [])]
    tested = {case for mark in marks for case in mark.args[1]}
    assert tested == {case for case in CASES if case.startswith(FAMILIES)}
