"""The trainer's arithmetic against golden values that published implementations agree with.

Test ids are the cases' names in algorithms_golden.json.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout_queue.tokens import TokenIds
from tests.trainer_service.rig import turn
from trainer_service.advantage import drgrpo, silence
from trainer_service.batch import rows_of
from trainer_service.diagnostics import mismatch, staleness
from trainer_service.loss import policy_loss, rollout_weights, selected_logprobs
from trainer_service.settings import AlgorithmSettings

GOLDEN = json.loads((Path(__file__).parent / "algorithms_golden.json").read_text(encoding="utf-8"))
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in GOLDEN["cases"]}
INPUTS: dict[str, Any] = GOLDEN["inputs"]
MASK = torch.tensor(INPUTS["mask"]) == 1
ROWS_T = torch.arange(9)[:, None].expand(9, 6)[MASK]

LOSSES: dict[str, dict[str, Any]] = {
    "loss.ppo_clip_sym": {"clip_high": 0.2, "dual_clip": None, "tis_cap": None},
    "loss.ppo_clip_higher": {"dual_clip": None, "tis_cap": None},
    "loss.ppo_dual_clip": {"tis_cap": None},
    "loss.ppo_tis_token2": {"clip_high": 0.2, "dual_clip": None},
}


def flat(name: str) -> Tensor:
    """An input of the response region, as the trainer has it: trained tokens only, in float64."""
    return torch.tensor(INPUTS[name], dtype=torch.float64)[MASK]


def close(got: Any, expected: Any) -> bool:
    return torch.allclose(
        torch.as_tensor(got, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=1e-6,
        atol=1e-6,
    )


def canonical_loss(
    anchor: str, algorithm: AlgorithmSettings, lp_new_T: Tensor | None = None
) -> tuple[Any, Tensor]:
    lp_new_T = (flat("lp_new") if lp_new_T is None else lp_new_T).requires_grad_()
    losses = policy_loss(
        lp_new_T, flat("lp_prox"), flat(anchor), flat("adv"), ROWS_T, int(MASK.sum()), algorithm
    )
    losses.loss.backward()  # type: ignore[no-untyped-call]
    assert lp_new_T.grad is not None
    return losses, lp_new_T.grad


@pytest.mark.parametrize("case", LOSSES)
def test_loss(case: str) -> None:
    expected = CASES[case]["expected"]
    algorithm = AlgorithmSettings(**LOSSES[case])
    losses, gradient_T = canonical_loss("lp_roll", algorithm)
    assert close(losses.loss.detach(), expected["loss"])
    assert close(losses.per_token_T, torch.tensor(expected["per_token"], dtype=torch.float64)[MASK])
    assert close(gradient_T, torch.tensor(expected["dloss_dlp"], dtype=torch.float64)[MASK])
    if "clip_frac" in expected:
        clipped = (losses.clipped_high_T | losses.clipped_low_T).double().mean()
        assert close(clipped, expected["clip_frac"])
        assert close(losses.dual_T.double().mean(), expected["dual_clip_frac"])
        assert close(losses.ratio_T.mean(), expected["ratio_mean"])


@pytest.mark.parametrize("case", ["agg.token_mean"])
def test_aggregation(case: str) -> None:
    expected = CASES[case]["expected"]
    losses, _ = canonical_loss("lp_roll", AlgorithmSettings(**LOSSES["loss.ppo_clip_sym"]))
    assert close(losses.loss.detach(), expected["loss"])
    assert close(losses.per_token_T @ torch.tensor(expected["weights"])[MASK].double(), expected["loss"])


@pytest.mark.parametrize(("case", "level"), [("adv.drgrpo", "row"), ("adv.drgrpo_rollout_level", "rollout")])
def test_advantage(case: str, level: str) -> None:
    ids = INPUTS["rollout_id"] if level == "rollout" else list(range(9))
    rewards: dict[int, dict[Any, float]] = {}
    for group, rollout, reward in zip(INPUTS["group_id"], ids, INPUTS["reward"], strict=True):
        rewards.setdefault(group, {})[rollout] = reward
    by_rollout: dict[Any, float] = {}
    for group_rewards in rewards.values():
        by_rollout |= dict(zip(group_rewards, drgrpo(list(group_rewards.values())), strict=True))
    assert close([by_rollout[rollout] for rollout in ids], CASES[case]["expected"]["adv"])


@pytest.mark.parametrize("case", ["mini.group_1001"])
def test_group(case: str) -> None:
    assert close(drgrpo(CASES[case]["params"]["reward"]), CASES[case]["expected"]["drgrpo"])


@pytest.mark.parametrize("case", ["filter.zero_variance_groups"])
def test_filter(case: str) -> None:
    groups: dict[str, list[float]] = {}
    for group, reward in zip(INPUTS["group_id"], INPUTS["reward"], strict=True):
        groups.setdefault(str(group), []).append(reward)
    keep = {group: float(silence(rewards, 1e-6) is None) for group, rewards in groups.items()}
    assert keep == CASES[case]["expected"]["keep_by_group"]


@pytest.mark.parametrize("case", ["is.tis_token_2"])
def test_weights(case: str) -> None:
    expected = CASES[case]["expected"]
    weight_T, kept_T = rollout_weights(flat("lp_prox"), flat("lp_roll"), ROWS_T, AlgorithmSettings())
    assert close(weight_T, torch.tensor(expected["w"], dtype=torch.float64)[MASK])
    assert close((kept_T & (weight_T >= 2)).double().mean(), expected["capped_frac"])


@pytest.mark.parametrize("case", ["mask.outlier_token_seq"])
def test_outliers(case: str) -> None:
    bounds = CASES[case]["params"]
    algorithm = AlgorithmSettings(outlier_low=bounds["low"], outlier_high=bounds["high"])
    _, kept_T = rollout_weights(flat("lp_prox"), flat("lp_roll"), ROWS_T, algorithm)
    kept = [float(kept_T[row == ROWS_T].all()) for row in range(9)]
    assert kept == [float(kept_T[row == ROWS_T].any()) for row in range(9)]
    assert kept == CASES[case]["expected"]["keep_seq"]


@pytest.mark.parametrize("case", ["metrics.mismatch"])
def test_metrics(case: str) -> None:
    expected = CASES[case]["expected"]
    names = {"k3": "k3_kl", "abs_logp": "abs_logp_diff", "ess": "ess_token"}
    for name, value in mismatch(flat("lp_prox"), flat("lp_roll"), ROWS_T).items():
        short = name.removeprefix("mismatch/")
        assert close(value, expected[names.get(short, short)]), name


@pytest.mark.parametrize("case", ["logits.logp_entropy_T1.0", "logits.logp_entropy_T0.7"])
def test_logits(case: str) -> None:
    logits_TV = torch.tensor(INPUTS["logits"]).reshape(6, 5)
    temperature_T = torch.full((6,), CASES[case]["params"]["temperature"])
    logprobs_T, entropy_T = selected_logprobs(
        logits_TV, torch.tensor(INPUTS["tokens"]).flatten(), temperature_T
    )
    expected = CASES[case]["expected"]
    for got, name in ((logprobs_T, "logp"), (entropy_T, "entropy")):
        assert torch.allclose(got, torch.tensor(expected[name]).flatten(), rtol=5e-5, atol=5e-5)


MINI: dict[str, dict[str, Any]] = {
    "mini.ppo_sym": LOSSES["loss.ppo_clip_sym"],
    "mini.ppo_higher": LOSSES["loss.ppo_clip_higher"],
    "mini.ppo_tis2": LOSSES["loss.ppo_tis_token2"],
    "mini.decoupled_cap5": LOSSES["loss.ppo_tis_token2"] | {"tis_cap": 5.0},
}


@pytest.mark.parametrize("case", [f"{name}_{sign}" for name in MINI for sign in ("pos", "neg")])
def test_mini(case: str) -> None:
    params, expected = CASES[case]["params"], CASES[case]["expected"]
    new, prox, roll, advantage = (
        torch.tensor([params[name]], dtype=torch.float64) for name in ("lp_new", "lp_prox", "lp_roll", "adv")
    )
    new.requires_grad_()
    algorithm = AlgorithmSettings(**MINI[case.rsplit("_", 1)[0]])
    losses = policy_loss(new, prox, roll, advantage, torch.zeros(1, dtype=torch.long), 1, algorithm)
    losses.loss.backward()  # type: ignore[no-untyped-call]
    assert close(losses.loss.detach(), expected["loss"])
    assert new.grad is not None
    assert close(new.grad[0], expected["dloss_dlp"])


@pytest.mark.parametrize("case", ["async.prime_staleness"])
def test_staleness(case: str) -> None:
    rows = CASES[case]["params"]["rows"]
    got = [list(staleness(step - 1, first, last)) for step, first, last in rows]
    assert got == CASES[case]["expected"]["staleness"]


@pytest.mark.parametrize("case", ["trajectory.exact_prefix_merge"])
def test_trajectory(case: str) -> None:
    turns: list[Any] = []
    prompts: list[list[int]] = []
    for number, given in enumerate(CASES[case]["params"]["turns"]):
        whole = [*given["prompt"], *given["output"]]
        parent = next(
            (i for i, p in reversed(list(enumerate(prompts))) if given["prompt"][: len(p)] == p), None
        )
        context = given["prompt"][len(prompts[parent]) :] if parent is not None else given["prompt"]
        fields = {"parent_id": f"t{parent}"} if parent is not None else {}
        turns.append(
            turn(
                turn_id=f"t{number}",
                context_ids=TokenIds(context),
                output_ids=given["output"],
                logprobs=given["logprobs"],
                started_at=100.0 + number,
                **fields,
            )
        )
        prompts.append(whole)
    rows = rows_of("s1", turns, [t.turn_id for t in turns], 1.0)
    got = [
        {"ids": row.ids_L.tolist(), "mask": row.mask_L.tolist(), "lp": row.logprobs_L.tolist()}
        for row in rows
    ]
    for row, expected in zip(got, CASES[case]["expected"]["rows"], strict=True):
        assert (row["ids"], row["mask"]) == (expected["ids"], expected["mask"])
        assert close(row["lp"], expected["lp"])
