"""The losses that imitate, by independent arithmetic in numpy and by their properties."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hypothesis_profiles import examples
from tests.support.trainer_service.canonical import PLAIN, canonical_counts, canonical_tokens, close, learned
from trainer_service.algorithms.imitation import top_k_kl
from trainer_service.algorithms.policy_loss import LossSettings
from trainer_service.algorithms.settings import AlgorithmSettings

pytestmark = pytest.mark.numeric

few = settings(max_examples=examples(20))
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0
WEIGHT = 0.3


def made(loss: dict[str, Any] | str, **others: Any) -> LossSettings:
    return LossSettings.model_validate(PLAIN | {"loss": loss} | others)


def of(tokens: Any, name: str) -> Any:
    return getattr(tokens, name).detach().numpy()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kdrl_is_ppo_plus_the_distance_from_the_teacher(estimator: str) -> None:
    tokens = canonical_tokens()
    now, begin, teacher = (of(tokens, name) for name in ("lp_new_T", "lp_prox_T", "lp_teacher_T"))
    advantage = of(tokens, "advantages_T")
    ratio = np.exp(now - begin)
    ppo = np.maximum(-ratio * advantage, -np.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    ppo = np.where(advantage < 0, np.minimum(ppo, -DUAL_CLIP * advantage), ppo)
    gap = now - teacher
    distance = gap**2 / 2 if estimator == "k2" else np.exp(-gap) - 1 + gap
    slope = gap if estimator == "k2" else 1 - np.exp(-gap)

    way = made({"name": "kdrl", "coefficient": WEIGHT, "estimator": estimator})
    found, gradient_T = learned(tokens, way, canonical_counts())
    assert close(found.loss.detach(), np.mean(ppo + WEIGHT * distance))
    _, of_ppo_T = learned(canonical_tokens(), made("ppo"), canonical_counts())
    assert close(gradient_T, of_ppo_T + torch.from_numpy(WEIGHT * slope) / len(now))


def test_cross_entropy_is_the_mean_of_minus_log_p_with_the_weights_of_the_correction() -> None:
    tokens = canonical_tokens()
    now, begin, engine = (of(tokens, name) for name in ("lp_new_T", "lp_prox_T", "lp_roll_T"))
    found, gradient_T = learned(tokens, made("cross_entropy"), canonical_counts())
    assert close(found.loss.detach(), np.mean(-now))
    assert close(gradient_T, np.full(len(now), -1 / len(now)))
    weight = np.minimum(np.exp(begin - engine), 2.0)
    weighed, _ = learned(tokens, made("cross_entropy", correction="tis_token"), canonical_counts())
    assert close(weighed.loss.detach(), np.mean(-weight * now))


def test_the_distance_from_the_top_tokens_has_the_rest_as_one_outcome() -> None:
    policy = np.array([[0.5, 0.2], [0.1, 0.6], [0.25, 0.25]])
    teacher = np.array([[0.4, 0.3], [0.5, 0.5 - 1e-9], [0.25, 0.25]])

    def outcomes(p: Any) -> Any:
        rest = np.maximum(1 - p.sum(1, keepdims=True), 1e-7)
        return np.concatenate([p, rest], 1)

    wanted = (outcomes(teacher) * np.log(outcomes(teacher) / outcomes(policy))).sum(1)
    found = top_k_kl(torch.from_numpy(np.log(policy)), torch.from_numpy(np.log(teacher)))
    # The teacher is widened to float64 here, and 1 - 1e-7 is a rest with 9 digits.
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-7, atol=1e-9)
    assert found[2] == 0


VOCABULARY = 12
logits = st.lists(st.floats(-5, 5), min_size=VOCABULARY, max_size=VOCABULARY)


def of_logits(lp_policy_V: torch.Tensor, lp_teacher_V: torch.Tensor, k: int) -> torch.Tensor:
    top_K = lp_teacher_V.topk(k).indices
    return top_k_kl(lp_policy_V[top_K][None], lp_teacher_V[top_K][None])[0]


@few
@given(logits, logits, st.integers(1, VOCABULARY - 2))
def test_more_top_tokens_come_closer_to_the_kl_from_below(
    policy: list[float], teacher: list[float], k: int
) -> None:
    lp_policy_V, lp_teacher_V = (torch.tensor(each).double().log_softmax(0) for each in (policy, teacher))
    kl = (lp_teacher_V.exp() * (lp_teacher_V - lp_policy_V)).sum()
    fewer, more = (of_logits(lp_policy_V, lp_teacher_V, count) for count in (k, k + 1))
    all_but_one = of_logits(lp_policy_V, lp_teacher_V, VOCABULARY - 1)
    assert -1e-9 <= fewer <= more + 1e-9
    assert more <= kl + 1e-9
    assert close(all_but_one, kl, 1e-5)  # then the rest is a single token


@few
@given(logits, st.integers(1, VOCABULARY))
def test_a_policy_that_equals_its_teacher_is_not_moved_by_its_top_tokens(values: list[float], k: int) -> None:
    logits_V = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    lp_V = logits_V.log_softmax(0)
    distance = of_logits(lp_V, lp_V.detach(), k)
    (gradient_V,) = torch.autograd.grad(distance, logits_V)
    assert abs(float(distance.detach())) < 1e-9
    assert float(gradient_V.abs().max()) < 1e-6


def test_forward_kl_and_kdrl_take_the_distance_from_the_top_tokens() -> None:
    def told() -> Any:
        tokens = canonical_tokens()
        half_T1 = torch.full((len(tokens.lp_new_T), 1), 0.5, dtype=torch.float64).log()
        return replace(tokens, teacher_kl_T=top_k_kl(tokens.lp_new_T[:, None], half_T1))

    p = np.exp(of(canonical_tokens(), "lp_new_T"))
    distance = 0.5 * np.log(0.5 / p) + 0.5 * np.log(0.5 / (1 - p))
    found, gradient_T = learned(told(), made("forward_kl"), canonical_counts())
    assert close(found.loss.detach(), np.mean(distance))
    assert close(gradient_T, (-0.5 + 0.5 * p / (1 - p)) / len(p))
    mixed = {"name": "kdrl", "coefficient": WEIGHT, "estimator": "top_k"}
    joint, _ = learned(told(), made(mixed), canonical_counts())
    ppo, _ = learned(told(), made("ppo"), canonical_counts())
    assert close(joint.loss.detach(), ppo.loss.detach() + WEIGHT * np.mean(distance))
    assert [
        made(loss).loss.teacher_top_k for loss in ("forward_kl", mixed, mixed | {"estimator": "k2"}, "ppo")
    ] == [16, 16, 0, 0]


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"loss": "cross_entropy", "advantage": "rloo"}, "loss cross_entropy does not use rewards"),
        ({"loss": "kdrl"}, "coefficient"),
        (
            {"loss": {"name": "kdrl", "coefficient": 0.1, "anchor": "rollout"}},
            "would correct for it a second time",
        ),
    ],
    ids=str,
)
def test_contradictory_settings_are_refused(algorithm: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AlgorithmSettings.model_validate(algorithm)
