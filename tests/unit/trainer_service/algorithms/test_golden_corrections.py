"""Correction weights, masks, the estimated anchor, logits and mismatch metrics against golden values.

Test ids are the cases' names in algorithms_golden.json.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.trainer_service.canonical import (
    CASES,
    INPUTS,
    ROWS_T,
    canonical_tokens,
    cases,
    close,
    expected,
    given,
)
from trainer_service.algorithms.corrections import (
    Geometric,
    Icepop,
    Kpop,
    M2po,
    Outlier,
    Product,
    Rejection,
    TisSequence,
    TisToken,
    TokenWeights,
    larger_bernoulli_kl,
)
from trainer_service.algorithms.tokens import RowIndex, interpolation_weight, loglinear
from trainer_service.model.logprob_head import selected_logprobs
from trainer_service.step.diagnostics import mismatch, mismatch_sums

pytestmark = pytest.mark.numeric

LOG_RHO_T = given("lp_prox") - given("lp_roll")
TOKENS = canonical_tokens()
Params = dict[str, Any]


def _normalised(params: Params) -> TokenWeights:
    weights = TisToken(cap=params["cap"]).weigh(TOKENS)
    return weights.normalised(weights.mean(weights.kept_T))


WEIGHTS: dict[str, Callable[[Params], TokenWeights]] = {
    "is.tis_token_2": lambda params: TisToken(cap=params["cap"]).weigh(TOKENS),
    "is.tis_seq_5": lambda params: TisSequence(cap=params["cap"]).weigh(TOKENS),
    "is.icepop_0.5_5": lambda params: Icepop(low=params["low"], high=params["high"]).weigh(TOKENS),
    "is.tis_token_2_batchnorm": _normalised,
}


@pytest.mark.parametrize("case", cases("is."))
def test_weights(case: str) -> None:
    weights, wanted = WEIGHTS[case](CASES[case]["params"]), expected(case)
    assert close(weights.weight_T, wanted["w"])
    if "capped_frac" in wanted:
        assert close(weights.capped_T.double().mean(), wanted["capped_frac"])
    if "oob_frac" in wanted:
        assert close((~weights.kept_T).double().mean(), wanted["oob_frac"])


def rejected(name: str) -> Callable[[Params], Rejection]:
    level, estimator = name.rsplit("_", 1)
    return lambda params: Rejection(level=level, estimator=estimator, **params)


MASKS: dict[str, Callable[[Params], Any]] = {
    "mask.geo_seq": lambda params: Geometric(**params),
    "mask.product_seq": lambda params: Product(**params),
    "mask.outlier_token_seq": lambda params: Outlier(**params),
    "mask.m2po": lambda params: M2po(limit=params["threshold"]),
    "mask.kpop_binary_kl": lambda params: Kpop(**params),
} | {
    f"mask.rs_{name}": rejected(name)
    for name in ("token_k1", "token_k2", "token_k3", "seq_mean_k1", "seq_mean_k3", "seq_max_k2")
}


@pytest.mark.parametrize("case", cases("mask."))
def test_mask(case: str) -> None:
    mask, wanted, rows = MASKS[case](CASES[case]["params"]), expected(case), RowIndex.of(ROWS_T)
    kept_T = mask.kept(TOKENS, mask.bound(LOG_RHO_T) if isinstance(mask, M2po) else torch.inf)
    got = {
        "keep": kept_T.double(),
        "keep_seq": rows.mean(kept_T.double()),
        "geo_ratio": rows.mean(LOG_RHO_T).exp(),
        "product_ratio": rows.sum(LOG_RHO_T).exp(),
        "kept_mean_m2": (LOG_RHO_T[kept_T] ** 2).mean(),
        "metric": larger_bernoulli_kl(given("lp_prox"), given("lp_roll")),
    }
    for name, value in wanted.items():
        assert close(got[name], value), name


@pytest.mark.parametrize("case", cases("prox."))
def test_prox(case: str) -> None:
    version = CASES[case]["params"]["current_version"]
    versions_T = given("versions").long()
    assert close(interpolation_weight(versions_T, version=version), expected(case)["alpha"])
    lp_prox_T = loglinear(given("lp_new"), given("lp_roll"), versions_T, version=version)
    assert close(lp_prox_T, expected(case)["lp_prox"])


MISMATCH = {
    "k3_kl": "k3",
    "abs_logp_diff": "abs_logp",
    "training_ppl": "train_ppl",
    "log_ppl_diff": "log_ppl",
    "log_ppl_abs_diff": "abs_log_ppl",
    "ess_token": "ess",
    "max_ratio": "rho_max",
    "min_ratio": "rho_min",
}
"""The trainer's names of the metrics, by the names in the golden case."""


@pytest.mark.parametrize("case", cases("metrics."))
def test_metrics(case: str) -> None:
    got = mismatch(mismatch_sums(given("lp_prox"), given("lp_roll"), ROWS_T))
    wanted = expected(case)
    for name, value in wanted.items():
        assert close(got[f"mismatch/{MISMATCH.get(name, name)}"], value), name
    assert len(got) == len(wanted)


LOGITS_TV = torch.tensor(INPUTS["logits"], dtype=torch.float64).reshape(6, 5)
TARGETS_T = torch.tensor(INPUTS["tokens"]).flatten()


@pytest.mark.parametrize("case", cases("logits.logp_entropy"))
def test_logits(case: str) -> None:
    temperatures_T = torch.full((6,), CASES[case]["params"]["temperature"], dtype=torch.float64)
    logprobs_T, entropy_T = selected_logprobs(LOGITS_TV, TARGETS_T, temperatures_T)
    assert close(logprobs_T, expected(case)["logp"].flatten())
    assert close(entropy_T, expected(case)["entropy"].flatten())


@pytest.mark.parametrize("case", cases("logits.topk"))
def test_top_k(case: str) -> None:
    """A sampler's top-k mask sets other logits to -inf. A target outside the mask has probability 0."""
    kept_TV = LOGITS_TV.topk(CASES[case]["params"]["k"], dim=-1).values[:, -1:] <= LOGITS_TV
    logprobs_T, _ = selected_logprobs(
        LOGITS_TV.masked_fill(~kept_TV, -torch.inf), TARGETS_T, torch.ones(6, dtype=torch.float64)
    )
    rows = CASES[case]["expected"]["logp"]
    for got, wanted in zip(logprobs_T, [value for row in rows for value in row], strict=True):
        assert close(got, -torch.inf if wanted is None else wanted)
