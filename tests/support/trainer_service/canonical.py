"""The canonical batch of algorithms_golden.json as the losses get it: trained tokens, flat, in float64."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_service.algorithms.aggregation import StepCounts
from trainer_service.algorithms.policy_loss import LossSettings, PolicyLoss, policy_loss
from trainer_service.algorithms.tokens import Tokens
from trainer_service.algorithms.turn_losses import StepStatistics

GOLDEN = json.loads((Path(__file__).with_name("algorithms_golden.json")).read_text(encoding="utf-8"))
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in GOLDEN["cases"]}
INPUTS: dict[str, Any] = GOLDEN["inputs"]
MASK = torch.tensor(INPUTS["mask"]) == 1
ROWS_T = torch.arange(9)[:, None].expand(9, 6)[MASK]
PLAIN: dict[str, Any] = {"correction": "none", "masks": ()}


def cases(*families: str) -> list[str]:
    return [case for case in CASES if case.startswith(families)]


def flat(values: Any) -> Tensor:
    """The values of trained tokens, if `values` has one per position; else the values unchanged."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor[MASK] if tensor.shape == MASK.shape else tensor


def given(name: str) -> Tensor:
    return flat(INPUTS[name])


def expected(case: str) -> dict[str, Tensor]:
    return {name: flat(values) for name, values in CASES[case]["expected"].items()}


TOLERANCE = float(GOLDEN["meta"]["tolerance"]["float64"])


def close(got: Any, wanted: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether both are equal within a tolerance, by default that of the golden file."""
    return torch.allclose(
        torch.as_tensor(got, dtype=torch.float64),
        torch.as_tensor(wanted, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


def canonical_tokens() -> Tokens:
    return Tokens(
        lp_new_T=given("lp_new").requires_grad_(),
        lp_prox_T=given("lp_prox"),
        lp_roll_T=given("lp_roll"),
        advantages_T=given("adv"),
        rows_T=ROWS_T,
        lp_ref_T=given("lp_ref"),
        lp_teacher_T=given("teacher"),
    )


def counts_of(rows_T: Tensor, rollout_R: Tensor, group_R: Tensor) -> StepCounts:
    """The counts of a step; `rows_T` is the row of each token."""
    return StepCounts(torch.bincount(rows_T, minlength=len(rollout_R)), rollout_R, group_R)


def canonical_counts() -> StepCounts:
    rollouts = sorted(set(INPUTS["rollout_id"]))
    return counts_of(
        ROWS_T,
        torch.tensor([rollouts.index(rollout) for rollout in INPUTS["rollout_id"]]),
        torch.tensor(INPUTS["group_id"]),
    )


def learned(
    tokens: Tokens,
    settings: LossSettings,
    counts: StepCounts,
    statistics: StepStatistics | None = None,
) -> tuple[PolicyLoss, Tensor]:
    """The loss, and its gradient with respect to `lp_new_T`."""
    found = policy_loss(tokens, settings, counts, statistics)
    tokens.lp_new_T.grad = None
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert tokens.lp_new_T.grad is not None
    return found, tokens.lp_new_T.grad
