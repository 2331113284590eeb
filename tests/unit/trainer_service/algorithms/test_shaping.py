"""Shaping by length, truncated rollouts, groups without advantages, and settings that are refused."""

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tests.support.trainer_service.choices import choices
from trainer_service.algorithms.advantages import Advantage, contradiction
from trainer_service.algorithms.returns import TokenAdvantage, turn_discount
from trainer_service.algorithms.rollouts import (
    LengthPenalty,
    NoSignal,
    Overlong,
    Rollout,
    Rollouts,
    ShapingSettings,
    groups_without_signal,
    shaped,
    untruncated,
)
from trainer_service.step.diagnostics import staleness

pytestmark = pytest.mark.numeric

settings_of = TypeAdapter(Advantage).validate_python


def rewards_of(rollouts: tuple[Rollout, ...]) -> list[float]:
    return [each.reward for each in rollouts]


def test_the_overlong_penalty_does_not_grow_beyond_max_len() -> None:
    limit = ShapingSettings(overlong=Overlong(max_len=100, cache=20, factor=0.5))
    rollouts = [Rollout(str(n), "g", 1.0, output_tokens=n) for n in (10, 80, 90, 100, 5000)]
    assert rewards_of(shaped(rollouts, limit)) == [1.0, 1.0, 0.75, 0.5, 0.5]


def test_a_negative_mean_reward_does_not_reward_length() -> None:
    penalty = ShapingSettings(length_penalty=LengthPenalty(output_tokens=0.5))
    rollouts = [Rollout("short", "g", -1.0, output_tokens=1), Rollout("long", "g", -1.0, output_tokens=9)]
    assert rewards_of(shaped(rollouts, penalty)) == [-1.0, -1.0]


def test_lengths_are_compared_inside_a_group_and_a_length_of_0_costs_nothing() -> None:
    penalty = ShapingSettings(length_penalty=LengthPenalty(output_tokens=0.5, turns=0.25))
    rollouts = [
        Rollout("a", "g", 1.0, output_tokens=10),
        Rollout("b", "g", 1.0, output_tokens=5),
        Rollout("c", "h", 1.0, output_tokens=1000, turns=4),
        Rollout("d", "h", 0.0, output_tokens=500, turns=1),
    ]
    assert rewards_of(shaped(rollouts, penalty)) == [0.5, 0.75, 1 - 0.5 * 0.75, -0.5 * (0.25 + 0.0625)]


def test_without_shaping_rewards_stay_as_they_are() -> None:
    rollouts = (Rollout("a", "g", 0.1, output_tokens=10), Rollout("b", "g", -3.0, truncated=True))
    assert shaped(rollouts, ShapingSettings()) == rollouts
    assert shaped((), ShapingSettings()) == ()


def test_a_truncated_rollout_is_left_out_or_gets_0_or_is_kept() -> None:
    whole = Rollout("a", "g", 1.0, parts={"style": 1.0})
    cut = Rollout("b", "g", 0.5, truncated=True, parts={"style": 0.5})
    assert untruncated([whole, cut]) == ((whole,), (cut,))
    assert untruncated([whole, cut], "keep") == ((whole, cut), ())
    compared, masked = untruncated([whole, cut], "zero")
    assert (compared[0], masked) == (whole, ())
    assert (compared[1].reward, compared[1].parts) == (0.0, {"style": 0.0})


def test_a_group_without_signal_has_a_reason() -> None:
    rollouts = Rollouts(
        (
            Rollout("a", "lone", 0.7),
            Rollout("b", "equal", 1.0),
            Rollout("c", "equal", 1.0),
            Rollout("d", "close", 0.0),
            Rollout("e", "close", 1e-6),
            Rollout("f", "apart", 0.0),
            Rollout("g", "apart", 2e-6),
        )
    )
    assert groups_without_signal(rollouts) == {
        "lone": NoSignal("singleton", "singleton group"),
        "equal": NoSignal("zero_var", "all 2 rewards of the group are 1"),
        "close": NoSignal("zero_var", "all 2 rewards of the group are 0"),
    }
    assert groups_without_signal(Rollouts(())) == {}


def test_a_group_whose_parts_differ_has_a_signal_although_their_sums_are_equal() -> None:
    parts = ({"first": 1.0, "second": 0.0}, {"first": 0.0, "second": 1.0})
    rollouts = Rollouts(tuple(Rollout(str(at), "g", 1.0, parts=each) for at, each in enumerate(parts)))
    assert groups_without_signal(rollouts).keys() == {"g"}
    assert not groups_without_signal(rollouts, parts=("first", "second"))


def test_a_session_without_any_reward_has_no_return() -> None:
    assert turn_discount([None, 1.0, None], discount=0.5) == [0.5, 1.0, 0.0]
    with pytest.raises(ValueError, match="null is not 0"):
        turn_discount([None, None], discount=0.5)


def test_a_row_of_a_later_version_is_not_stale() -> None:
    younger = staleness(3, torch.tensor([4]), torch.tensor([5]))
    assert [each_R.tolist() for each_R in younger] == [[0], [0], [0]]
    found = staleness(9, torch.tensor([4]), torch.tensor([7]))
    assert [each_R.tolist() for each_R in found] == [[5], [3], [2]]


def test_a_name_alone_stands_for_its_defaults() -> None:
    for name in choices(Advantage).keys() - {"gdpo"}:
        assert settings_of(name) == settings_of({"name": name})
        assert settings_of(name).name == name


def test_every_name_has_its_settings_and_no_other() -> None:
    kinds = choices(Advantage)
    assert all(isinstance(settings_of(name), kinds[name]) for name in kinds.keys() - {"gdpo"})
    schema = TypeAdapter(Advantage).json_schema()
    assert schema["discriminator"]["mapping"].keys() == kinds.keys()


NONSENSE: list[tuple[Any, str]] = [
    ("grpo", "grpo"),
    ({"name": "grpo_ddof1", "eps": 0}, "eps"),
    ({"name": "drgrpo", "eps": 1e-6}, "eps"),
    ({"name": "gdpo", "weights": {}}, "no part of the reward has a weight"),
    ({"name": "gdpo", "weights": {"style": float("nan")}}, "weights"),
    ({"name": "rae", "decay": 1.0}, "decay"),
    ({"name": "gae", "gamma": 1.5}, "gamma"),
    ({"name": "turn_gae", "lam": -0.1}, "lam"),
    ({"name": "gpg", "f_norm": 0}, "f_norm"),
]


@pytest.mark.parametrize(("given", "said"), NONSENSE, ids=str)
def test_an_estimator_refuses_nonsense(given: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        settings_of(given)


SHAPELESS: list[tuple[dict[str, Any], str]] = [
    ({"overlong": {"max_len": 100, "cache": 101}}, "a cache of 101 does not fit into max_len, 100"),
    ({"overlong": {"max_len": 100, "cache": 0}}, "cache"),
    ({"length_penalty": {}}, "no length has a weight"),
    ({"length_penalty": {"turns": 1.1}}, "turns"),
    ({"kl_in_reward": -1}, "kl_in_reward"),
    ({"truncated": "drop"}, "truncated"),
    ({"clip": 1}, "clip"),
]


@pytest.mark.parametrize(("given", "said"), SHAPELESS, ids=str)
def test_shaping_refuses_nonsense(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ShapingSettings(**given)


@pytest.mark.parametrize("setting", ["kl_in_reward", "turn_discount"])
def test_rewards_of_tokens_contradict_estimators_that_compare_rollouts(setting: str) -> None:
    shaping = ShapingSettings(**{setting: 0.5})
    for name, kind in choices(Advantage).items():
        if issubclass(kind, TokenAdvantage):
            assert contradiction(settings_of(name), shaping) is None
        elif name != "gdpo":
            assert f"{name} compares whole rollouts" in (contradiction(settings_of(name), shaping) or "")
    assert contradiction(settings_of("drgrpo"), ShapingSettings()) is None


def test_a_length_penalty_contradicts_gdpo() -> None:
    gdpo = settings_of({"name": "gdpo", "weights": {"style": 1.0}})
    shaping = ShapingSettings(length_penalty=LengthPenalty(turns=0.1))
    assert "changes only their sum" in (contradiction(gdpo, shaping) or "")
