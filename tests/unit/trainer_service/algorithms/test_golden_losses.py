"""The policy losses, composed as in training, against golden values that published implementations give.

Test ids are the cases' names in algorithms_golden.json.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.trainer_service.canonical import (
    CASES,
    PLAIN,
    ROWS_T,
    canonical_counts,
    canonical_tokens,
    cases,
    close,
    expected,
    given,
    learned,
)
from trainer_service.algorithms.imitation import teacher_advantage
from trainer_service.algorithms.kl import KLS
from trainer_service.algorithms.policy_loss import LossSettings, PolicyLoss
from trainer_service.algorithms.tokens import RowIndex, Tokens
from trainer_service.algorithms.turn_losses import CovarianceCut, KlCov, StepStatistics

pytestmark = pytest.mark.numeric

Params = dict[str, Any]
Made = dict[str, Any]


def ppo(params: Params) -> Made:
    low, high = params.get("eps_low", 0.2), params.get("eps_high", 0.2)
    return {"loss": {"name": "ppo", "clip_low": low, "clip_high": high, "dual_clip": params.get("c")}}


def gspo(params: Params) -> Made:
    return {"loss": {"name": "gspo", "clip_low": params["eps_low"], "clip_high": params["eps_high"]}}


def gmpo(params: Params) -> Made:
    loss = {"name": "gmpo", "clip_low": params["eps_low"], "clip_high": params["eps_high"]}
    return {"loss": loss, "aggregation": {"mode": "seq_mean_token_mean"}}


def cispo(params: Params) -> Made:
    loss = {"name": "cispo", "low": params["low"], "high": params["high"]}
    return {"loss": loss | {"anchor": params.get("anchor", "prox")}}


def dppo(divergence: str, form: str) -> Callable[[Params], Made]:
    def made(params: Params) -> Made:
        loss = {"name": "dppo", "divergence": divergence, "form": form}
        loss |= {"low": params["low"], "high": params["high"], "kappa": params.get("kl_tau", 0.0)}
        return {"loss": loss | {"anchor": params.get("anchor", "prox")}}

    return made


def ipo(params: Params) -> Made:
    return {"loss": {"name": "ipo", "limit": params["threshold"], "kappa": params["kl_tau"]}}


def glm5(params: Params) -> Made:
    return {"loss": {"name": "glm5", "low": params["eps_low"], "high": params["eps_high"]}}


def sapo(params: Params) -> Made:
    loss = {"name": "sapo", "tau_positive": params["tau_pos"], "tau_negative": params["tau_neg"]}
    return {"loss": loss}


def corrected(correction: Callable[[Params], Made]) -> Callable[[Params], Made]:
    return lambda params: ppo(params) | {"correction": correction(params)}


def composite(_: Params) -> Made:
    kl = {"estimator": "k3", "coefficient": 1e-3}
    loss = {"name": "ppo", "dual_clip": None}
    return {"loss": loss, "correction": "tis_token", "masks": ("outlier",), "kl": kl}


LOSSES: dict[str, Callable[[Params], Made]] = {
    "loss.ppo_clip_sym": ppo,
    "loss.ppo_clip_higher": ppo,
    "loss.ppo_dual_clip": ppo,
    "loss.gspo": gspo,
    "loss.gspo_wide": gspo,
    "loss.cispo_minimax": cispo,
    "loss.cispo_tight": cispo,
    "loss.cispo_rollout_anchor": cispo,
    "loss.reinforce": lambda _: {"loss": "reinforce"},
    "loss.importance_sampling": lambda _: {"loss": "importance_sampling"},
    "loss.sapo": sapo,
    "loss.dppo_tv_ratio": dppo("tv", "ratio"),
    "loss.dppo_kl_ratio": dppo("kl", "ratio"),
    "loss.dppo_tv_logp": dppo("tv", "logp"),
    "loss.dppo_kl_logp": dppo("kl", "logp"),
    "loss.dppo_tv_plus_kl2": dppo("tv", "ratio"),
    "loss.ipo_symmetric_tv": ipo,
    "loss.rollout_is_glm5": glm5,
    "loss.dro": lambda params: {"loss": {"name": "dro", "beta": params["beta"]}},
    "loss.gmpo": gmpo,
    "loss.ppo_opsm": lambda params: ppo(params) | {"masks": ({"name": "opsm", "delta": params["delta"]},)},
    "loss.ppo_tis_token2": corrected(lambda params: {"name": "tis_token", "cap": params["cap"]}),
    "loss.ppo_tis_seq5": corrected(lambda params: {"name": "tis_sequence", "cap": params["cap"]}),
    "loss.ppo_icepop": corrected(
        lambda params: {"name": "icepop", "low": params["low"], "high": params["high"]}
    ),
    "loss.decoupled_ppo_mask5": corrected(lambda params: {"name": "icepop", "low": 0, "high": params["cap"]}),
    "loss.decoupled_ppo_clamp5": corrected(lambda params: {"name": "tis_token", "cap": params["cap"]}),
    "loss.composite_default": composite,
    "opd.reverse_kl_adv": lambda _: {"loss": "reverse_kl"},
    "opd.ref_kl_prime": lambda params: {
        "loss": {"name": "ref_kl", "low": params["tv_low"], "kappa": params["kl_tau"]}
    },
}
BY_HAND = {"loss.kl_cov"}
"""Cases with a test of their own. They choose tokens by lp_new, but a step's statistics choose by lp_prox."""


def settings_of(case: str) -> LossSettings:
    made = PLAIN | LOSSES[case](CASES[case]["params"])
    mode = CASES[case]["params"].get("agg", "token_mean")
    return LossSettings.model_validate({"aggregation": {"mode": mode}} | made)


def said(found: PolicyLoss, name: str) -> Any:
    """The value of a loss that a golden case calls `name`."""
    match name:
        case "per_token":
            return found.per_token_T
        case "loss":
            return found.loss.detach()
        case "clip_frac":
            return (found.clipped_high_T | found.clipped_low_T).double().mean()
        case "dual_clip_frac":
            return found.dual_T.double().mean()
        case "masked_frac":
            return found.dropped_T.double().mean()
        case "ratio_mean":
            return found.ratio_T.mean()
        case "per_sequence":
            return RowIndex.of(ROWS_T).mean(found.per_token_T)
        case "opsm_mask":
            return found.kept_T.double()
        case "adv":
            return teacher_advantage(given("lp_new"), given("teacher"))
        case "mean_reverse_kl":
            return -teacher_advantage(given("lp_new"), given("teacher")).mean()
    raise AssertionError(f"nothing compares {name}")


@pytest.mark.parametrize("case", LOSSES)
def test_loss(case: str) -> None:
    found, gradient_T = learned(canonical_tokens(), settings_of(case), canonical_counts())
    for name, wanted in expected(case).items():
        assert close(gradient_T if name == "dloss_dlp" else said(found, name), wanted), name


IN_FLOAT32 = (
    "loss.ppo_dual_clip",
    "loss.gspo_wide",
    "loss.cispo_minimax",
    "loss.dppo_kl_logp",
    "opd.ref_kl_prime",
)
"""One of each kind: by token, by row, by weights, by divergence, and with a teacher."""


@pytest.mark.parametrize("case", IN_FLOAT32)
def test_loss_in_float32(case: str) -> None:
    narrow = {
        name: values_T if name == "rows_T" else values_T.detach().float()
        for name, values_T in canonical_tokens().given().items()
    }
    narrow["lp_new_T"].requires_grad_()
    found, gradient_T = learned(Tokens(**narrow), settings_of(case), canonical_counts())
    assert found.loss.dtype == torch.float32
    assert close(found.loss.detach(), expected(case)["loss"], 5e-5)
    if "dloss_dlp" in expected(case):
        assert close(gradient_T, expected(case)["dloss_dlp"], 5e-5)


@pytest.mark.parametrize("case", sorted(BY_HAND))
def test_kl_cov(case: str) -> None:
    params, wanted = CASES[case]["params"], expected(case)
    lp_new_T, advantages_T = given("lp_new"), given("adv")
    cut = CovarianceCut.of(lp_new_T, advantages_T, fraction=params["frac"])
    chosen_T = cut.chosen(lp_new_T, advantages_T)
    tokens = replace(canonical_tokens(), lp_prox_T=lp_new_T, lp_roll_T=given("lp_prox"))
    loss = KlCov(fraction=params["frac"], coefficient=params["coef"], anchor="rollout")
    losses = loss.losses(tokens, StepStatistics(covariance=cut))
    assert close(chosen_T.double(), wanted["selected"])
    assert close(losses.loss_T, wanted["per_token"])
    assert close(losses.loss_T.mean(), wanted["loss"])


@pytest.mark.parametrize("case", cases("agg."))
def test_aggregation(case: str) -> None:
    params = CASES[case]["params"]
    made = ppo({}) | {"aggregation": {"mode": params["mode"], "horizon": params.get("horizon")}}
    if "denom" in params:
        made |= {"aggregation": {"mode": "fixed_denominator", "denominator": params["denom"]}}
    settings = LossSettings.model_validate(PLAIN | made)
    found, _ = learned(canonical_tokens(), settings, canonical_counts())
    assert close(found.aggregation_T, expected(case)["weights"])
    assert close(found.loss.detach(), expected(case)["loss"])


KL_NAMES = {"low_var_kl": "low_var", "unbiased_is_k3": "unbiased"}


@pytest.mark.parametrize("case", cases("kl."))
def test_kl(case: str) -> None:
    name = case.removeprefix("kl.")
    lp_new_T = given("lp_new").requires_grad_()
    kl_T = KLS[KL_NAMES.get(name, name)](lp_new_T, given("lp_ref"), given("lp_prox"))
    (gradient_T,) = torch.autograd.grad(kl_T.sum(), lp_new_T)
    got = {"kl": kl_T.detach(), "mean": kl_T.detach().mean(), "dkl_dlp": gradient_T}
    for value, wanted in expected(case).items():
        assert close(got[value], wanted), value


def test_every_case_of_these_families_is_compared() -> None:
    """The `mini` cases are the same losses of a single token."""
    assert {*cases("loss.", "opd.")} == {*LOSSES, *BY_HAND}
