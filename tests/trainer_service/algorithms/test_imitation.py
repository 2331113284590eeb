"""The losses `kdrl` and `cross_entropy`, by independent arithmetic in numpy and by their properties."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.support.hypothesis_profiles import examples
from tests.support.trainer_service.canonical import (
    PLAIN,
    canonical_counts,
    canonical_tokens,
    close,
    learned,
)
from tests.support.trainer_service.steps import Step, steps
from trainer_service.algorithms.losses.settings import LossSettings
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


@few
@given(steps())
def test_a_policy_that_equals_its_teacher_learns_only_from_rewards(step: Step) -> None:
    tokens = replace(step.tokens, lp_teacher_T=step.tokens.lp_new_T.detach())
    _, gradient_T = learned(tokens, made({"name": "kdrl", "coefficient": WEIGHT}), step.counts)
    _, of_ppo_T = learned(tokens, made("ppo"), step.counts)
    assert torch.equal(gradient_T, of_ppo_T)


@few
@given(steps())
def test_without_advantages_kdrl_moves_each_token_towards_the_teacher(step: Step) -> None:
    tokens = replace(step.tokens, advantages_T=torch.zeros_like(step.tokens.advantages_T))
    _, gradient_T = learned(tokens, made({"name": "kdrl", "coefficient": WEIGHT}), step.counts)
    assert torch.equal(gradient_T.sign(), (tokens.lp_new_T - tokens.teacher()).detach().sign())


def test_cross_entropy_is_the_mean_of_minus_log_p_with_the_weights_of_the_correction() -> None:
    tokens = canonical_tokens()
    now, begin, engine = (of(tokens, name) for name in ("lp_new_T", "lp_prox_T", "lp_roll_T"))
    found, gradient_T = learned(tokens, made("cross_entropy"), canonical_counts())
    assert close(found.loss.detach(), np.mean(-now))
    assert close(gradient_T, np.full(len(now), -1 / len(now)))
    weight = np.minimum(np.exp(begin - engine), 2.0)
    weighed, _ = learned(tokens, made("cross_entropy", correction="tis_token"), canonical_counts())
    assert close(weighed.loss.detach(), np.mean(-weight * now))


@few
@given(steps())
def test_cross_entropy_does_not_depend_on_advantages(step: Step) -> None:
    other = replace(step.tokens, advantages_T=-3 * step.tokens.advantages_T)
    losses = [learned(each, made("cross_entropy"), step.counts)[0].loss for each in (step.tokens, other)]
    assert torch.equal(*losses)


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
