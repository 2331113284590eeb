"""Properties of every loss with every correction, for any batch. P1 to P4 and P6 number them."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.hypothesis_profiles import examples
from tests.support.tolerances import FLOAT64, ulps
from tests.support.trainer_service.canonical import PLAIN, close, learned
from tests.support.trainer_service.steps import (
    CORRECTIONS,
    KLS,
    LOSSES,
    RATIO_MASKS,
    Step,
    kind,
    named,
    steps,
    ways,
)
from trainer_service.algorithms.aggregation import StepCounts
from trainer_service.algorithms.kl import KLS as KL_ESTIMATES
from trainer_service.algorithms.policy_loss import LossSettings, step_statistics
from trainer_service.algorithms.tokens import Tokens

pytestmark = pytest.mark.numeric

quick = settings(max_examples=examples(60))
few = settings(max_examples=examples(10))
EXACT = ulps(30, of=math.exp(5 * 2.5), unit=FLOAT64)
"""A loss adds up at most 30 tokens. The ratio of a row is at most e^12.5: it has up to five tokens, and noise
of 0.5 nats moves each by at most 2.5."""


def train(step: Step, way: LossSettings) -> tuple[Tensor, Tensor]:
    """The loss of the whole step in one micro-batch, and its gradient."""
    found, gradient_T = learned(step.tokens, way, step.counts, step_statistics(step.tokens, way))
    return found.loss.detach(), gradient_T


def parts(tokens: Tokens, chosen_T: Tensor) -> Tokens:
    """Some of the tokens, as a micro-batch, with an `lp_new_T` that is a new leaf."""
    given = {name: values_T.detach()[chosen_T] for name, values_T in tokens.given().items()}
    given["lp_new_T"].requires_grad_()
    return Tokens(**given)


@quick
@given(steps(), ways(), st.data())
def test_micro_batches_add_up_to_the_step(step: Step, way: LossSettings, data: st.DataObject) -> None:
    """P2: micro-batches add up to the step, also with corrections that depend on the whole step. Tokens come
    in any order, rows are in any micro-batch, and micro-batches may be empty."""
    rows, tokens = len(step.counts.tokens_R), len(step.tokens.rows_T)
    order_T = torch.tensor(data.draw(st.permutations(range(tokens))))
    home_R = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    home_T = home_R[step.tokens.rows_T[order_T]]
    places = [order_T[home_T == batch] for batch in range(3)]
    statistics = step_statistics(parts(step.tokens, torch.cat(places)), way)
    loss, gradient_T = torch.zeros((), dtype=torch.float64), torch.zeros(tokens).double()
    for place in places:
        found, share_T = learned(parts(step.tokens, place), way, step.counts, statistics)
        loss = loss + found.loss.detach()
        gradient_T[place] = share_T
    whole, whole_gradient_T = train(step, way)
    assert close(loss, whole, EXACT)
    assert close(gradient_T, whole_gradient_T, EXACT)


@quick
@given(steps(), ways(), st.data())
def test_holes_change_nothing(step: Step, way: LossSettings, data: st.DataObject) -> None:
    """P1: untrained tokens anywhere in a row, and rows without any trained token, change nothing."""
    tokens = len(step.tokens.rows_T)
    real_T = torch.tensor(sorted(data.draw(st.permutations(range(tokens + 3)))[:tokens]))
    beside_T = torch.zeros(tokens + 3, dtype=torch.int64)
    beside_T[real_T] = torch.arange(tokens)
    hole_T = torch.ones(tokens + 3, dtype=torch.bool)
    hole_T[real_T] = False
    wide = parts(step.tokens, beside_T)
    with torch.no_grad():
        for name in ("lp_new_T", "lp_roll_T", "lp_prox_T"):
            getattr(wide, name)[hole_T] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
        wide.rows_T.mul_(2)
    doubled = {
        name: getattr(step.counts, name).repeat_interleave(2) for name in ("tokens_R", "rollout_R", "group_R")
    }
    doubled["tokens_R"][1::2] = 0
    doubled["rollout_R"][1::2] += 5
    doubled["group_R"][1::2] += 5
    loss, gradient_T = train(Step(wide, StepCounts(**doubled)), way)
    dense, dense_gradient_T = train(step, way)
    assert close(loss, dense, EXACT)
    assert close(gradient_T[real_T], dense_gradient_T, EXACT)
    assert gradient_T[hole_T].abs().sum() == 0


@pytest.mark.parametrize("correction", CORRECTIONS, ids=named)
@few
@given(
    steps(),
    st.sampled_from(["ppo", "gspo", "cispo", "sapo", "gmpo", "kl_cov"]),
    st.lists(st.sampled_from(RATIO_MASKS), max_size=3),
)
def test_an_engine_that_agrees_needs_no_correction(
    correction: Any, step: Step, loss: str, masks: list[Any]
) -> None:
    """P3: if rho is 1, corrections change nothing."""
    agreed = step.with_tokens(lp_roll_T=step.tokens.lp_prox_T)
    made = {"loss": loss, "correction": correction, "masks": masks}
    got, gradient_T = train(agreed, LossSettings.model_validate(made))
    plain, plain_gradient_T = train(agreed, LossSettings.model_validate(PLAIN | {"loss": loss}))
    assert close(got, plain, EXACT)
    assert close(gradient_T, plain_gradient_T, EXACT)


STILL = ("ppo", "gspo", "cispo", "reinforce", "importance_sampling", "sapo", "dppo", "ipo", "glm5", "kl_cov")
"""The losses whose gradient is the negative advantage if the policy has not moved."""


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if kind(loss) in STILL], ids=named)
@few
@given(steps())
def test_a_policy_that_has_not_moved_learns_the_advantage(loss: Any, step: Step) -> None:
    """P4: if r is 1, the gradient is -A."""
    same_T = step.tokens.lp_new_T.detach()
    still = step.with_tokens(lp_prox_T=same_T, lp_roll_T=same_T)
    way = PLAIN | {"loss": loss, "aggregation": {"mode": "token_sum"}}
    _, gradient_T = train(still, LossSettings.model_validate(way))
    assert close(gradient_T, -step.tokens.advantages_T, EXACT)


PULLED = ("dro", "ipo", "kl_cov", "reverse_kl", "ref_kl", "kdrl", "cross_entropy")
"""These losses have a gradient for every token, whatever its advantage."""


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if kind(loss) not in PULLED], ids=named)
@few
@given(steps(), st.sampled_from(KLS), st.data())
def test_a_row_without_advantage_has_only_the_gradient_of_the_kl(
    loss: Any, step: Step, kl: str, data: st.DataObject
) -> None:
    """P6: the gradient is exactly 0 without a KL, and the KL's own gradient with one."""
    flat = data.draw(st.integers(0, len(step.counts.tokens_R) - 1))
    flat_T = step.tokens.rows_T == flat
    quiet = step.with_tokens(advantages_T=step.tokens.advantages_T.masked_fill(flat_T, 0.0))
    plain = LossSettings.model_validate(PLAIN | {"loss": loss})
    if getattr(plain.loss, "kappa", 0.0):
        plain = plain.model_copy(update={"loss": plain.loss.model_copy(update={"kappa": 0.0})})
    _, gradient_T = train(quiet, plain)
    assert gradient_T[flat_T].abs().sum() == 0
    pulled = LossSettings.model_validate(plain.model_dump() | {"kl": {"estimator": kl, "coefficient": 0.1}})
    _, pulled_T = train(quiet, pulled)
    assert step.tokens.lp_ref_T is not None
    kl_T = KL_ESTIMATES[kl](step.tokens.lp_new_T, step.tokens.lp_ref_T, step.tokens.lp_prox_T)
    (alone_T,) = torch.autograd.grad(0.1 * kl_T.mean(), step.tokens.lp_new_T)
    assert close(pulled_T[flat_T], alone_T[flat_T], EXACT)
