"""The order of operations from log-probabilities to a loss, its settings, and values that are not finite."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tests.support.trainer_service.canonical import (
    PLAIN,
    canonical_counts,
    canonical_tokens,
    close,
    counts_of,
    learned,
)
from tests.support.trainer_service.choices import choices
from tests.support.trainer_service.steps import LOSSES as EVERY_LOSS
from tests.support.trainer_service.steps import named
from trainer_service.algorithms.advantages import Advantage, RolloutAdvantage
from trainer_service.algorithms.aggregation import StepCounts
from trainer_service.algorithms.corrections import Correction, Mask
from trainer_service.algorithms.kl import KLS, Kl
from trainer_service.algorithms.policy_loss import Loss, LossSettings, policy_loss, step_statistics
from trainer_service.algorithms.returns import TokenAdvantage
from trainer_service.algorithms.settings import PRESETS, AlgorithmSettings
from trainer_service.algorithms.tokens import Tokens, interpolation_weight
from trainer_service.algorithms.turn_losses import Gspo, PolicyLossFormula, StepStatistics
from trainer_service.model.logprob_head import entropies, selected_logprobs

pytestmark = pytest.mark.numeric


def made(**parts: Any) -> LossSettings:
    return LossSettings.model_validate(PLAIN | parts)


def row(**differing: Sequence[float]) -> tuple[Tokens, StepCounts]:
    """Tokens of row 0. Log-probabilities are -1 and advantages 1, unless `differing` has other values."""
    length = len(next(iter(differing.values())))
    fields: dict[str, Sequence[float]] = dict.fromkeys(
        ("lp_new_T", "lp_prox_T", "lp_roll_T"), [-1.0] * length
    )
    fields |= {"advantages_T": [1.0] * length} | differing
    rows_T = torch.tensor(fields.pop("rows_T", [0.0] * length)).long()
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
    tensors["lp_new_T"].requires_grad_()
    numbers_R = torch.arange(int(rows_T.max()) + 1)
    return Tokens(rows_T=rows_T, **tensors), counts_of(rows_T, numbers_R, numbers_R)


def test_the_default_leaves_out_rows_with_an_outlier_and_keeps_them_in_the_denominator() -> None:
    tokens, counts = row(lp_roll_T=[-1.0, -11.0, -1.5, -0.2], rows_T=[0, 0, 1, 1])
    found, gradient_T = learned(tokens, LossSettings(), counts)
    assert found.kept_T.tolist() == [False, False, True, True]
    assert close(found.weight_T, [0.0, 0.0, math.exp(0.5), math.exp(-0.8)])
    assert close(gradient_T, [0.0, 0.0, -math.exp(0.5) / 4, -math.exp(-0.8) / 4])


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=named)
def test_log_probabilities_that_are_not_finite_cost_their_tokens_alone(loss: Any) -> None:
    """The tokens still count in the denominator."""
    way = made(loss=loss, kl={"coefficient": 0.1}, entropy_bonus=0.1)
    whole, lost = canonical_tokens(), [3, 5, 6]
    for name in ("lp_new_T", "lp_prox_T", "lp_roll_T", "lp_ref_T", "lp_teacher_T"):
        values_T = getattr(whole, name).detach().clone()
        values_T[lost] = values_T.new_tensor([float("nan"), float("-inf"), float("inf")])
        if name == "lp_new_T":
            values_T.requires_grad_()
        broken = replace(whole, **{name: values_T}, entropy_T=torch.ones_like(whole.lp_prox_T))
        found, gradient_T = learned(broken, way, canonical_counts(), step_statistics(broken, way))
        assert (~found.finite_T).nonzero().flatten().tolist() == lost, name
        assert not found.kept_T[lost].any()
        assert not torch.stack([found.weight_T, found.per_token_T, gradient_T])[:, lost].any(), name
        assert torch.isfinite(found.loss), name
        assert torch.isfinite(gradient_T).all(), name
        assert (gradient_T != 0).any(), name
        assert close(found.aggregation_T, 1 / 36)


@pytest.mark.parametrize("lost", [[0], [0, 1, 2]])
def test_a_micro_batch_without_kept_tokens_has_a_loss_of_0(lost: list[int]) -> None:
    tokens, counts = row(lp_roll_T=[-30.0 if place in lost else -1.0 for place in range(3)])
    found, gradient_T = learned(tokens, LossSettings(), counts)
    assert found.loss == 0
    assert gradient_T.tolist() == [0.0, 0.0, 0.0]


def test_log_probabilities_of_half_precision_are_computed_in_float32() -> None:
    narrow = {
        name: values_T if name == "rows_T" else values_T.detach().bfloat16()
        for name, values_T in canonical_tokens().given().items()
    }
    wide = {name: values_T if name == "rows_T" else values_T.float() for name, values_T in narrow.items()}
    way = made(loss="gspo", correction="tis_sequence", kl={"coefficient": 0.1})
    losses = [policy_loss(Tokens(**given), way, canonical_counts()) for given in (narrow, wide)]
    assert losses[0].loss.dtype == torch.float32
    assert losses[0].loss == losses[1].loss


@pytest.mark.parametrize(
    "left_out", [{"masks": ["outlier"]}, {"correction": "icepop"}], ids=["mask", "icepop"]
)
def test_tokens_that_are_left_out_have_no_kl_term(left_out: dict[str, Any]) -> None:
    tokens, counts = row(lp_new_T=[-1.0, -1.0], lp_roll_T=[-1.0, -30.0], rows_T=[0, 1])
    tokens = replace(tokens, lp_ref_T=torch.tensor([-2.0, -2.0], dtype=torch.float64))
    found, gradient_T = learned(tokens, made(kl={"coefficient": 1.0}, **left_out), counts)
    assert found.kept_T.tolist() == [True, False]
    assert gradient_T[0] != -0.5
    assert gradient_T[1] == 0


def test_step_statistics_leave_out_rows_that_a_mask_drops() -> None:
    """They affect neither M2PO's bound nor the mean weight. KL-Cov chooses among the trained tokens only."""
    lp_roll_T = [-1.0, -1.2, -1.4] + [-1.0] * 6 + [-30.0]
    tokens, counts = row(lp_roll_T=lp_roll_T, rows_T=[0] * 3 + [1] * 7)
    parts = {
        "correction": {"name": "tis_token", "normalise": True},
        "masks": [{"name": "m2po", "limit": 0.03}],
    }
    without = step_statistics(tokens.at(torch.arange(3)), made(**parts))
    parts["masks"].append("outlier")  # type: ignore[attr-defined]
    way = made(**parts)
    statistics = step_statistics(tokens, way)
    assert statistics == without
    found = policy_loss(tokens, way, counts, statistics)
    assert found.kept_T.tolist() == [True, True] + [False] * 8
    assert close(found.weight_T[:2].mean(), 1)
    assert found.weight_T[:2].tolist() == sorted(found.weight_T[:2].tolist())
    lp_prox_T = [-1.0, -2.0, -1.0, -0.1]
    tokens, _ = row(
        lp_prox_T=lp_prox_T,
        lp_roll_T=[*lp_prox_T[:3], -30.0],
        advantages_T=[1.0, 0.0, 1.0, 9.0],
        rows_T=[0, 0, 0, 1],
    )
    loss = {"name": "kl_cov", "fraction": 0.5}
    seen = step_statistics(tokens, made(loss=loss, masks=["outlier"]))
    assert seen == step_statistics(tokens.at(torch.arange(3)), made(loss=loss))


def test_weights_of_rows_are_normalised_over_rows() -> None:
    tokens, counts = row(lp_roll_T=[-1.5, -1.0, -1.0, -1.0], rows_T=[0, 1, 1, 1])
    way = made(correction={"name": "tis_sequence", "normalise": True})
    found = policy_loss(tokens, way, counts, step_statistics(tokens, way))
    assert close((found.weight_T[0] + found.weight_T[1]) / 2, 1)


def test_the_geometric_mask_measures_drift_by_token_and_the_product_mask_by_row() -> None:
    tokens, counts = row(lp_roll_T=[-1.05] * 4)
    kept = {
        name: policy_loss(tokens, made(masks=[{"name": name, "low": 0.9, "high": 1.1}]), counts).kept_T.all()
        for name in ("geometric", "product")
    }
    assert kept == {"geometric": True, "product": False}


def test_tokens_of_the_version_before_the_step_have_interpolation_weight_0() -> None:
    assert interpolation_weight(torch.tensor([6, 7, 8, 9]), version=8).tolist() == [0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "narrow", "wide"),
    [
        ({"name": "dppo", "divergence": "tv"}, 0.2, 0.4),
        ({"name": "dppo", "divergence": "kl"}, 0.1, 0.3),
        ({"name": "glm5"}, 0.5, 0.7),
        ({"name": "gmpo", "anchor": "rollout"}, 0.3, 1.0),
    ],
    ids=["dppo-tv", "dppo-kl", "glm5", "gmpo"],
)
@pytest.mark.parametrize("up", [True, False], ids=["high", "low"])
def test_each_side_has_its_own_bound(loss: dict[str, Any], narrow: float, wide: float, up: bool) -> None:
    """A good token's probability rises from 0.5 to 0.8, a bad one's falls to 0.2. Only the side with the
    narrow bound is clipped."""
    tokens, counts = row(
        lp_new_T=[math.log(0.8), math.log(0.2)],
        lp_roll_T=[math.log(0.5)] * 2,
        advantages_T=[1.0, -1.0],
        rows_T=[0, 1],
    )
    prefix = "clip_" if loss["name"] == "gmpo" else ""
    bounds = {f"{prefix}low": wide if up else narrow, f"{prefix}high": narrow if up else wide}
    found = policy_loss(tokens, made(loss=loss | bounds), counts)
    held_T = found.dropped_T | found.clipped_high_T | found.clipped_low_T
    assert held_T.tolist() == [up, not up]


def test_m2po_drops_all_tokens_if_even_the_smallest_square_is_too_large() -> None:
    tokens, counts = row(lp_roll_T=[-2.0, -3.0])
    way = made(masks=["m2po"])
    assert not policy_loss(tokens, way, counts, step_statistics(tokens, way)).kept_T.any()


def test_an_entropy_bonus_rewards_entropy() -> None:
    logits_TV = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]], requires_grad=True)
    targets_T, ones_T = torch.tensor([0, 1]), torch.ones(2)
    lp_T, said_T = selected_logprobs(logits_TV, targets_T, ones_T)
    entropy_T = entropies(logits_TV, ones_T)
    assert close(said_T, entropy_T.detach())
    assert not said_T.requires_grad
    rows_T = torch.zeros(2, dtype=torch.int64)
    tokens = Tokens(lp_T, lp_T, lp_T, 0 * ones_T, rows_T, entropy_T=entropy_T)
    counts = counts_of(rows_T, rows_T[:1], rows_T[:1])
    policy_loss(tokens, made(entropy_bonus=0.5), counts).loss.backward()  # type: ignore[no-untyped-call]
    got = logits_TV.grad
    logits_TV.grad = None
    (-0.5 * entropies(logits_TV, ones_T).mean()).backward()  # type: ignore[no-untyped-call]
    assert got is not None
    assert logits_TV.grad is not None
    assert close(got, logits_TV.grad)


def test_a_weight_and_a_mask_carry_no_gradient() -> None:
    """The anchor may be the forward pass itself. Then r is 1, and rho must carry no gradient."""
    tokens, counts = row(lp_roll_T=[-1.3, -0.8])
    same = replace(tokens, lp_prox_T=tokens.lp_new_T)
    _, gradient_T = learned(same, made(correction="tis_token"), counts)
    rho_T = (tokens.lp_new_T - tokens.lp_roll_T).exp().detach()
    assert close(gradient_T, -rho_T / 2)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_learns(preset: str) -> None:
    """The policy has not moved and the engine agrees with it, so that no preset clips or drops a token."""
    way, tokens = AlgorithmSettings(preset=preset), canonical_tokens()
    same_T = tokens.lp_new_T.detach()
    still = replace(tokens, lp_prox_T=same_T, lp_roll_T=same_T)
    found, gradient_T = learned(still, way, canonical_counts())
    assert not way.whole_step
    assert found.kept_T.all()
    assert torch.isfinite(found.loss)
    taught_T = still.advantages_T if preset != "opd" else torch.ones(36)
    assert torch.equal(gradient_T != 0, (taught_T != 0) | way.needs_reference)
    assert AlgorithmSettings.model_validate(way.model_dump(mode="json")) == way


def test_the_preset_default_equals_the_defaults_of_the_loss_settings() -> None:
    written = AlgorithmSettings(preset="default")
    assert (
        LossSettings(**{name: getattr(written, name) for name in LossSettings.model_fields}) == LossSettings()
    )


@pytest.mark.parametrize(
    ("parts", "without", "sentence"),
    [
        ({"kl": {"coefficient": 0.1}}, "lp_ref_T", "needs lp_ref_T"),
        ({"loss": "reverse_kl"}, "lp_teacher_T", "needs lp_teacher_T"),
        ({"loss": "ref_kl"}, "lp_teacher_T", "needs lp_teacher_T"),
        ({"loss": "forward_kl"}, "teacher_kl_T", "needs teacher_kl_T"),
        ({"entropy_bonus": 0.1}, "entropy_T", "needs entropy_T"),
        ({"loss": "kl_cov"}, None, "kl_cov needs the statistics"),
        ({"masks": ["m2po"]}, None, "m2po needs the statistics"),
        ({"correction": {"name": "tis_token", "normalise": True}}, None, "normalised weights need"),
    ],
)
def test_a_missing_input_is_named(parts: dict[str, Any], without: str | None, sentence: str) -> None:
    way = made(**parts)
    tokens = canonical_tokens()
    if without:
        tokens = replace(tokens, **{without: None})  # type: ignore[arg-type]
    assert way.whole_step == (without is None)
    with pytest.raises(ValueError, match=sentence):
        policy_loss(tokens, way, canonical_counts())


def test_inputs_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lp_roll_T has shape \[35\], but lp_new_T has \[36\]"):
        replace(canonical_tokens(), lp_roll_T=torch.zeros(35))
    with pytest.raises(ValueError, match="tokens_R has 2 rows, rollout_R 1 and group_R 1"):
        counts_of(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0]))


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"loss": {"name": "cispo", "anchor": "rollout"}, "correction": "tis_token"}, "a second time"),
        ({"loss": "dppo", "correction": "tis_sequence"}, "a second time"),
        ({"loss": "glm5", "correction": "icepop"}, "a second time"),
        ({"loss": {"name": "ppo", "anchor": "rollout"}, "correction": "tis_token"}, "a second time"),
        ({"loss": "dro"}, "beta"),
        ({"loss": {"name": "cispo", "low": 2, "high": 5}}, "leaves out 1"),
        ({"loss": "pop"}, "pop"),
        ({"masks": [{"name": "geometric", "low": 1.2, "high": 1.4}]}, "leaves out 1"),
        ({"masks": [{"name": "rejection", "estimator": "k1", "upper": 1}]}, "bounded by low and high"),
        ({"masks": [{"name": "rejection", "estimator": "k3", "low": 0.5}]}, "bounded by upper alone"),
        (
            {"masks": [{"name": "rejection", "estimator": "k1", "low": 1.5, "high": 2}]},
            "leaves out equal policies",
        ),
        (
            {"masks": [{"name": "rejection", "level": "seq_max", "estimator": "k1", "low": 0.5, "high": 2}]},
            "seq_max takes k2 or k3",
        ),
        ({"masks": ["kpop"]}, "upper"),
        ({"kl": {"estimator": "k1", "coefficient": 0.1}}, "does not pull to the reference"),
        ({"aggregation": {"mode": "seq_mean_token_sum_norm"}}, "horizon belongs to"),
        ({"aggregation": {"mode": "token_mean", "denominator": 4}}, "denominator belongs to"),
        ({"clip_low": 0.2}, "Extra inputs"),
        ({"entropy_bonus": float("nan")}, "finite"),
    ],
)
def test_nonsense_is_refused(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        LossSettings.model_validate(PLAIN | parts)


@pytest.mark.parametrize(
    ("parts", "needed"),
    [
        ({"loss": "dppo"}, False),
        ({"loss": "reinforce"}, False),
        ({"loss": "ppo"}, True),
        ({"loss": "dppo", "masks": ["geometric"]}, True),
        ({"loss": "reinforce", "correction": "tis_token"}, True),
        ({"loss": "dppo", "kl": {"estimator": "unbiased", "coefficient": 0.1}}, True),
    ],
)
def test_which_settings_need_the_log_probabilities_before_the_step(
    parts: dict[str, Any], needed: bool
) -> None:
    way = made(**parts)
    assert way.needs_anchor == needed
    tokens = canonical_tokens()
    other = replace(tokens, lp_prox_T=tokens.lp_prox_T - 0.3)
    losses = [policy_loss(given, way, canonical_counts()).loss for given in (tokens, other)]
    assert needed or losses[0] == losses[1]


def test_every_name_that_can_be_set_is_implemented() -> None:
    assert all(kind.losses is not PolicyLossFormula.losses for kind in choices(Loss).values())
    assert all(callable(kind.kept) for kind in choices(Mask).values())
    assert all(callable(kind.weigh) for kind in choices(Correction).values())
    for kind in choices(Advantage).values():
        formulas = [getattr(kind, name, None) for name in ("score", "estimate")]
        assert {*formulas} - {None, RolloutAdvantage.score, TokenAdvantage.estimate}, kind
    assert set(KLS) == set(get_args(Kl.model_fields["estimator"].annotation))


def test_a_name_alone_stands_for_its_defaults() -> None:
    assert TypeAdapter(Loss).validate_python("gspo") == Gspo()
    assert StepStatistics() == StepStatistics(None, None, None)
