"""The losses of a user's own loop, against their formulas written target by target, in float64."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.hypothesis_profiles import examples
from tests.support.tolerances import FLOAT64, ulps
from trainer_service.algorithms.summed_losses import SUMMED_LOSSES, LossRefused, check_inputs, chosen_loss

pytestmark = pytest.mark.numeric

quick = settings(max_examples=examples(60))
Numbers = Mapping[str, Tensor]
Formula = Callable[[Tensor, Numbers, list[int], Mapping[str, float]], Tensor]
EXACT = ulps(64, of=math.exp(4), unit=FLOAT64)
"""At most 12 targets, with a few roundings each. Ratios are below e^2, and advantages below e^2."""


def at_most(value: Tensor, bound: float) -> Tensor:
    return torch.where(value > bound, torch.full_like(value, bound), value)


def bounded(ratio: Tensor, config: Mapping[str, float]) -> Tensor:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    return -at_most(-at_most(ratio, high), -low)


def smaller(one: Tensor, other: Tensor) -> Tensor:
    return one if one <= other else other


def of_cross_entropy(lp: Tensor, of: Numbers, _rows: list[int], _config: Mapping[str, float]) -> Tensor:
    return -sum((w * p for w, p in zip(of["weights"].flatten(), lp.flatten(), strict=True)), lp.new_zeros(()))


def over_targets(loss: Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]) -> Formula:
    def total(lp: Tensor, of: Numbers, _rows: list[int], config: Mapping[str, float]) -> Tensor:
        each = zip(lp[:, 0], of["logprobs"][:, 0], of["advantages"][:, 0], strict=True)
        return sum((loss(p, q, a, config) for p, q, a in each), lp.new_zeros(()))

    return total


def of_gspo(lp: Tensor, of: Numbers, rows: list[int], config: Mapping[str, float]) -> Tensor:
    total = lp.new_zeros(())
    for row in set(rows):
        places = [at for at, each in enumerate(rows) if each == row]
        masked = [at for at in places if of["sequence_ratio_mask"][at, 0]]
        differences = [lp[at, 0].detach() - of["logprobs"][at, 0] for at in masked]
        s = torch.stack(differences).mean().exp() if masked else lp.new_ones(())
        for at in places:
            own = s * torch.exp(lp[at, 0] - lp[at, 0].detach())
            a = of["advantages"][at, 0]
            total = total - smaller(own * a, bounded(own, config) * a)
    return total


def of_sapo(p: Tensor, q: Tensor, a: Tensor, c: Mapping[str, float]) -> Tensor:
    tau = c["tau_positive"] if a > 0 else c["tau_negative"]
    return -4 / tau / (1 + torch.exp(-tau * (torch.exp(p - q) - 1))) * a


def of_dppo(p: Tensor, q: Tensor, a: Tensor, c: Mapping[str, Any]) -> Tensor:
    moved = (p.exp() - q.exp()).detach()
    inside = moved <= c["high"] if a > 0 else moved >= -c["low"]
    if not inside:
        return 0 * p
    return -torch.exp(p - q) * a if c["form"] == "ratio" else -torch.exp(p - q).detach() * a * p


def of_glm5(p: Tensor, q: Tensor, a: Tensor, c: Mapping[str, float]) -> Tensor:
    r = torch.exp(p - q).detach()
    return -r * a * p if 1 - c["low"] < r < 1 + c["high"] else 0 * p


FORMULAS: dict[str, Formula] = {
    "cross_entropy": of_cross_entropy,
    "importance_sampling": over_targets(lambda p, q, a, _: -torch.exp(p - q) * a),
    "ppo": over_targets(lambda p, q, a, c: -smaller(torch.exp(p - q) * a, bounded(torch.exp(p - q), c) * a)),
    "cispo": over_targets(lambda p, q, a, c: -bounded(torch.exp(p - q), c).detach() * p * a),
    "gspo": of_gspo,
    "dro": over_targets(lambda p, q, a, c: -(p * a - c["beta"] / 2 * (p - q) * (p - q))),
    "reinforce": over_targets(lambda p, _, a, __: -a * p),
    "sapo": over_targets(of_sapo),
    "dppo": over_targets(of_dppo),
    "glm5": over_targets(of_glm5),
}
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "cross_entropy": [{}],
    "importance_sampling": [{}],
    "ppo": [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}],
    "cispo": [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}],
    "gspo": [{}, {"clip_low_threshold": 0.6, "clip_high_threshold": 1.5}],
    "dro": [{"beta": 0.0}, {"beta": 0.3}],
    "reinforce": [{}],
    "sapo": [{}, {"tau_positive": 2.0, "tau_negative": 0.5}],
    "dppo": [{}, {"form": "logp", "low": 0.05, "high": 0.3, "ratio_cap": 100.0}],
    "glm5": [{}, {"low": 0.5, "high": 2.0}],
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "dppo": {"divergence": "tv", "form": "ratio", "low": 0.2, "high": 0.2, "ratio_cap": 20.0},
    "glm5": {"low": 0.2, "high": 0.2},
}
CASES = [(name, config) for name, configs in CONFIGS.items() for config in configs]


def numbers(count: int, k: int, seed: int) -> tuple[Tensor, Numbers, list[int]]:
    """Log-probabilities, every input, and the rows of so many positions."""
    draw = torch.Generator().manual_seed(seed)
    lp, q = (-2 * torch.rand(count, k, generator=draw, dtype=torch.float64) for _ in range(2))
    of = {
        "weights": torch.randn(count, k, generator=draw, dtype=torch.float64),
        "advantages": torch.randn(count, k, generator=draw, dtype=torch.float64),
        "logprobs": q,
        "sequence_ratio_mask": (torch.rand(count, k, generator=draw) > 0.4).double(),
    }
    rows = torch.randint(0, 3, (count,), generator=draw).tolist()
    return lp.requires_grad_(), of, rows


@pytest.mark.parametrize(("name", "config"), CASES)
@quick
@given(st.integers(1, 12), st.integers(0, 2**31))
def test_a_loss_has_the_value_and_the_gradient_of_its_formula(
    name: str, config: dict[str, Any], count: int, seed: int
) -> None:
    k = 3 if SUMMED_LOSSES[name].soft and seed % 2 else 1
    lp, of, rows = numbers(count, k, seed)
    loss = chosen_loss(name, config)
    found = loss.losses(lp, {each: of[each] for each in loss.inputs}, torch.tensor(rows)).sum()
    (gradient,) = torch.autograd.grad(found, lp)
    wanted = FORMULAS[name](lp, of, rows, {**DEFAULTS.get(name, {}), **config})
    (wanted_gradient,) = torch.autograd.grad(wanted, lp)
    assert found.item() == pytest.approx(wanted.item(), abs=EXACT)
    assert torch.allclose(gradient, wanted_gradient, rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", sorted(SUMMED_LOSSES.keys() - {"cross_entropy", "dro"}))
@quick
@given(st.integers(1, 12), st.integers(0, 2**31))
def test_a_target_with_advantage_0_is_left_alone(name: str, count: int, seed: int) -> None:
    """Loops give prompts this advantage, and 0 as the log-probability with which they were sampled. DRO's
    own formula pulls every target."""
    lp, of, rows = numbers(count, 1, seed)
    prompt = dict(of, advantages=torch.zeros_like(lp), logprobs=torch.zeros_like(lp))
    loss = chosen_loss(name, CONFIGS[name][0])
    found = loss.losses(lp, {each: prompt[each] for each in loss.inputs}, torch.tensor(rows)).sum()
    (gradient,) = torch.autograd.grad(found, lp)
    assert found == 0
    assert not gradient.any()


def test_losses_have_the_defaults_of_the_interface() -> None:
    assert {name: dict(chosen_loss(name, {}).config) for name in DEFAULTS} == DEFAULTS


REFUSALS = {
    "unknown": ("ppoo", {}, "loss ppoo is not offered. The losses are `cross_entropy`, .*`dro`"),
    "unpublished": ("stable_reinforce", {}, r"not published.*`ppo`.*AsyncConfig.*The losses are .*`gspo`"),
    "setting": ("ppo", {"kl_coeff": 1.0}, "no setting `kl_coeff`; its settings are `clip_low_threshold`, "),
    "no settings": ("cross_entropy", {"beta": 1.0}, "no setting `beta`; it has no settings"),
    "missing": ("dro", {}, "needs the setting `beta`, which has no default"),
    "text": ("dro", {"beta": "0.1"}, "beta must be a finite number, not '0.1'"),
    "infinite": ("dro", {"beta": math.inf}, "beta must be a finite number"),
    "below": ("sapo", {"tau_positive": 0.0}, "loss sapo: tau_positive 0.0: .*greater than 0"),
    "choice": ("dppo", {"form": "ratios"}, "loss dppo: form 'ratios': .*'ratio' or 'logp'"),
    "number": ("dppo", {"form": 1.0}, "form must be text, not 1.0"),
    "no pull": ("dppo", {"kappa": 0.1}, "no setting `kappa`; its settings are `divergence`"),
    "bounds": ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold 2.0 is above clip_high_threshold 1.2"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_loss_or_setting_that_does_not_exist_is_refused_with_those_that_do(case: str) -> None:
    name, config, sentence = REFUSALS[case]
    with pytest.raises(LossRefused, match=sentence):
        chosen_loss(name, config)  # type: ignore[arg-type] # one case gives text


def test_inputs_are_those_of_the_loss() -> None:
    ppo = chosen_loss("ppo", {})
    check_inputs(ppo, ("logprobs", "advantages"), 1)
    check_inputs(chosen_loss("cross_entropy", {}), ("weights",), 7)
    with pytest.raises(LossRefused, match="ppo needs `advantages`"):
        check_inputs(ppo, ("logprobs",), 1)
    with pytest.raises(LossRefused, match="takes `logprobs`, `advantages`, and not `weights`"):
        check_inputs(ppo, ("logprobs", "advantages", "weights"), 1)
    with pytest.raises(LossRefused, match="one target for each position, not 7; several: `cross_entropy`"):
        check_inputs(ppo, ("logprobs", "advantages"), 7)
