"""Properties of every advantage, for any rewards. P1, P2 and P5 number those that losses may share."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from tests.support.hypothesis_profiles import examples
from tests.support.tolerances import FLOAT64, ulps
from tests.support.trainer_service.choices import choices
from trainer_service.algorithms.advantages import Advantage, Rae, RolloutAdvantage
from trainer_service.algorithms.returns import (
    WHITEN_EPS,
    TokenRewards,
    at_ends,
    kl_in_reward,
    value_loss,
    whitened,
)
from trainer_service.algorithms.rollouts import RefusedRollout, Rollout, Rollouts, groups_without_signal

pytestmark = pytest.mark.numeric

quick = settings(max_examples=examples(20))

PARTS = {"first": 1.0, "second": -0.5}
ADVANTAGES = {name: kind for name, kind in choices(Advantage).items() if issubclass(kind, RolloutAdvantage)}
COMPARING = [name for name, estimator in ADVANTAGES.items() if estimator.compares]
GROUPWISE = [name for name, estimator in ADVANTAGES.items() if not estimator.whole_step]
settings_of: Callable[[Any], Any] = TypeAdapter(Advantage).validate_python


def chosen_by(name: str) -> Any:
    return settings_of({"name": "gdpo", "weights": PARTS} if name == "gdpo" else name)


def score(name: str, members: Sequence[Rollout]) -> Tensor:
    scored: Tensor = chosen_by(name).score(Rollouts(tuple(members)))
    return scored


def rollout(name: str, group: str = "g", reward: float = 1.0, **fields: Any) -> Rollout:
    given: dict[str, Any] = {"output_tokens": 3, "parts": dict.fromkeys(PARTS, reward)}
    return Rollout(name, group, reward, **(given | fields))


CONDITION = 2.0**11
"""How much the division by a group's deviation may enlarge the rounding of its mean. Rewards are float16 up
to 8; the largest differ by at least 2^-8, which is 2^-11 of 8."""


def same(got: Tensor, wanted: Tensor) -> None:
    """Assert equality except for rounding, even if an estimator divides by a deviation twice (gdpo)."""
    largest = max([1.0, *wanted.abs().flatten().tolist()])
    torch.testing.assert_close(got, wanted, rtol=0, atol=ulps(CONDITION**2, of=largest, unit=FLOAT64))


rewards = st.floats(0, 8, width=16)


@st.composite
def batches(draw: st.DrawFn, smallest: int = 1) -> list[Rollout]:
    """Up to four groups of up to five rollouts."""
    members = []
    for group in range(draw(st.integers(1, 4))):
        for number in range(draw(st.integers(smallest, 5))):
            fields = {
                "parts": {name: draw(rewards) for name in PARTS},
                "output_tokens": draw(st.integers(1, 50)),
                "agent": draw(st.sampled_from("ab")),
            }
            members.append(rollout(f"{group}.{number}", f"g{group}", draw(rewards), **fields))
    return members


@pytest.mark.parametrize("name", COMPARING)
@quick
@given(batch=batches(), data=st.data())
def test_order_changes_nothing(name: str, batch: list[Rollout], data: st.DataObject) -> None:
    """P5: groups may be assembled in any order, and so may their members."""
    order = data.draw(st.permutations(range(len(batch))))
    got = score(name, [batch[at] for at in order])
    same(got, score(name, batch)[order])


@pytest.mark.parametrize("name", COMPARING)
@quick
@given(batch=batches(), reward=rewards)
def test_a_rollout_alone_in_its_group_has_advantage_0(name: str, batch: list[Rollout], reward: float) -> None:
    assert score(name, [*batch, rollout("lone", "alone", reward)])[-1] == 0
    assert score(name, [rollout("lone", "alone", reward)]).tolist() == [0.0]


@pytest.mark.parametrize("name", COMPARING)
@quick
@given(batch=batches(), reward=st.floats(0, 1e9), size=st.integers(2, 7))
def test_equal_rewards_give_an_advantage_of_exactly_0(
    name: str, batch: list[Rollout], reward: float, size: int
) -> None:
    equal = [rollout(f"e{number}", "equal", reward, output_tokens=number + 1) for number in range(size)]
    assert score(name, [*batch, *equal])[len(batch) :].tolist() == [0.0] * size


@pytest.mark.parametrize("name", COMPARING)
def test_the_better_rollout_gets_the_larger_advantage(name: str) -> None:
    parts = [{"first": value, "second": 0.0} for value in (0.25, 1.0)]
    worse, better = score(
        name, [rollout("w", reward=0.25, parts=parts[0]), rollout("b", reward=1.0, parts=parts[1])]
    )
    assert worse <= 0 < better


@quick
@given(name=st.sampled_from(sorted(ADVANTAGES)), batch=batches(smallest=2), data=st.data())
def test_a_rollout_counts_once_however_many_rows_it_has(
    name: str, batch: list[Rollout], data: st.DataObject
) -> None:
    """Each row of a forked rollout gets the advantage that the rollout gets without forks."""
    forks = data.draw(st.lists(st.integers(1, 4), min_size=len(batch), max_size=len(batch)))
    rollout_R = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(forks))
    rows_T = torch.repeat_interleave(torch.arange(len(rollout_R)), 2)
    chosen = chosen_by(name)
    if "whiten" in type(chosen).model_fields:
        chosen = chosen.model_copy(update={"whiten": False})
    advantages_B = score(name, batch)
    got_T = chosen.to_tokens(advantages_B, rollout_R, rows_T)
    assert got_T.tolist() == [
        advantages_B[at].item() for at, rows in enumerate(forks) for _ in range(2 * rows)
    ]


def test_a_reward_that_is_null_is_not_zero() -> None:
    with pytest.raises(RefusedRollout, match="rollout r7: its reward is null"):
        Rollout("r7", "g", None)  # type: ignore[arg-type]
    with pytest.raises(RefusedRollout, match="rollout r7: it has no reward for 'second'"):
        score("gdpo", [rollout("r1"), rollout("r7", parts={"first": 1.0})])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_refused_with_the_rollouts_id(reward: float) -> None:
    with pytest.raises(RefusedRollout, match=f"rollout r7: its reward is {reward}") as refusal:
        Rollout("r7", "g", reward)
    assert refusal.value.rollout_id == "r7"
    with pytest.raises(RefusedRollout, match=f"rollout r7: its style is {reward}"):
        Rollout("r7", "g", 1.0, parts={"style": reward})


@pytest.mark.parametrize(
    ("estimator", "second", "sentence"),
    [
        ("grpo_ddof1", rollout("r1"), "rollout r1 is given twice"),
        ("maxrl", rollout("r2", reward=-1.0), "rollout r2: maxrl takes no reward below 0"),
        ("opo", rollout("r2", output_tokens=0), "rollout r2: opo weighs it by its trained tokens"),
    ],
)
def test_a_rollout_that_a_formula_does_not_allow_is_refused_with_its_id(
    estimator: str, second: Rollout, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        score(estimator, [rollout("r1"), second])


@quick
@given(name=st.sampled_from(GROUPWISE), batch=batches())
def test_estimators_without_whole_step_score_a_group_alone_as_with_others(
    name: str, batch: list[Rollout]
) -> None:
    by_group = [[each for each in batch if each.group_id == group] for group in {m.group_id for m in batch}]
    for group in by_group:
        at = [batch.index(each) for each in group]
        same(score(name, group), score(name, batch)[at])


@pytest.mark.parametrize("name", ["liteppo", "gpg"])
def test_estimators_that_need_the_whole_step_say_so(name: str) -> None:
    first = [rollout("a", "1", 0.0), rollout("b", "1", 1.0)]
    second = [rollout("c", "2", 1.0), rollout("d", "2", 5.0)]
    assert ADVANTAGES[name].whole_step
    assert not torch.allclose(score(name, first), score(name, first + second)[:2])


@quick
@given(batch=batches(), data=st.data())
def test_a_baseline_depends_only_on_the_order_of_its_agents_rollouts(
    batch: list[Rollout], data: st.DataObject
) -> None:
    """P5 holds between agents: another interleaving of their rollouts changes nothing."""
    whose = data.draw(st.permutations([each.agent for each in batch]))
    left = {agent: [each for each in batch if each.agent == agent] for agent in "ab"}
    mixed = [left[agent].pop(0) for agent in whose]
    got = dict(zip([each.rollout_id for each in mixed], score("rae", mixed).tolist(), strict=True))
    assert [got[each.rollout_id] for each in batch] == score("rae", batch).tolist()
    after = [Rae().baselines_after(Rollouts(tuple(each))) for each in (batch, mixed)]
    assert after[0] == after[1]


def test_a_lone_rollout_gets_its_reward_minus_its_agents_baseline() -> None:
    lone = Rollouts((rollout("r1", reward=1.0, agent="a"),), baselines={"a": 0.75})
    assert Rae().score(lone).tolist() == [0.25]
    assert lone.baselines == {"a": 0.75}


@st.composite
def dense(draw: st.DrawFn) -> list[list[tuple[int, float, float]]]:
    """Up to four rows of up to twelve positions, each with a mask, a reward and a value."""
    position = st.tuples(st.integers(0, 1), st.floats(-4, 4, width=32), st.floats(-4, 4, width=32))
    rows = draw(st.lists(st.lists(position, min_size=1, max_size=12), min_size=1, max_size=4))
    return [[*row, (1, 0.5, 0.25)] for row in rows]  # each row needs a trained token


def tokens_of(rows: list[list[tuple[int, float, float]]]) -> TokenRewards:
    """The trained positions. Each run of trained positions between two holes is a turn."""
    rewards_T, values_T, rows_T, turns_T, turns = [], [], [], [], 0
    for row, positions in enumerate(rows):
        turns += 1
        for trained, reward, value in positions:
            if not trained:
                turns += 1
                continue
            rewards_T.append(reward)
            values_T.append(value)
            rows_T.append(row)
            turns_T.append(turns)
    return TokenRewards(
        torch.tensor(rewards_T), torch.tensor(rows_T), torch.tensor(values_T), torch.tensor(turns_T)
    )


TOKEN_SETTINGS: list[dict[str, Any]] = [
    {"name": "reinforce_pp", "gamma": 0.9},
    {"name": "reinforce_pp"},
    {"name": "gae", "gamma": 0.9, "lam": 0.8, "whiten": False},
    {"name": "gae", "gamma": 0.9, "lam": 0.8},
    {"name": "turn_gae", "gamma": 0.9, "lam": 0.8, "whiten": False},
]


@pytest.mark.parametrize("chosen", TOKEN_SETTINGS[:4], ids=lambda each: each["name"])
@quick
@given(rows=dense(), data=st.data())
def test_holes_change_nothing(
    chosen: dict[str, Any], rows: list[list[tuple[int, float, float]]], data: st.DataObject
) -> None:
    """P1: a hole, such as tool output, changes nothing, whatever its rewards and values are."""
    holed = []
    for row in rows:
        longer = list(row)
        for at in sorted(data.draw(st.lists(st.integers(0, len(row)), max_size=4)), reverse=True):
            longer.insert(at, (0, 77.0, -77.0))
        holed.append(longer)
    found, again = (settings_of(chosen).estimate(tokens_of(each)) for each in (rows, holed))
    assert torch.equal(found.advantages_T, again.advantages_T)
    assert torch.equal(found.returns_T, again.returns_T)


@quick
@given(rows=dense())
def test_returns_equal_those_of_a_backward_loop_over_trained_tokens(
    rows: list[list[tuple[int, float, float]]],
) -> None:
    gamma, lam = 0.9, 0.8
    to_go: list[float] = []
    advantages: list[float] = []
    for row in reversed(rows):
        worth = advantage = following = 0.0
        for trained, reward, value in reversed(row):
            if trained:
                worth = reward + gamma * worth
                advantage = reward + gamma * following - value + gamma * lam * advantage
                following = value
                to_go.append(worth)
                advantages.append(advantage)
    tokens = tokens_of(rows)
    plain = settings_of({"name": "reinforce_pp", "gamma": gamma}).estimate(tokens)
    found = settings_of(TOKEN_SETTINGS[2]).estimate(tokens)
    same(plain.returns_T, torch.tensor(to_go[::-1], dtype=torch.float64))
    same(found.advantages_T, torch.tensor(advantages[::-1], dtype=torch.float64))


@pytest.mark.parametrize("chosen", TOKEN_SETTINGS, ids=lambda each: each["name"])
@quick
@given(rows=dense(), data=st.data())
def test_the_order_of_rows_changes_nothing(
    chosen: dict[str, Any], rows: list[list[tuple[int, float, float]]], data: st.DataObject
) -> None:
    """P2: the packing of a step changes nothing."""
    order = data.draw(st.permutations(range(len(rows))))
    estimate, tokens = settings_of(chosen).estimate, tokens_of(rows)
    found, again = estimate(tokens), estimate(tokens_of([rows[at] for at in order]))
    at_T = torch.cat([torch.nonzero(tokens.rows_T == row).flatten() for row in order])
    # These are sums over 48 tokens of returns up to 48. Whitening divides them by at least √WHITEN_EPS.
    allowed = ulps(48, of=48.0, unit=FLOAT64) / math.sqrt(WHITEN_EPS)
    torch.testing.assert_close(again.advantages_T, found.advantages_T[at_T], rtol=0, atol=allowed)
    same(again.returns_T, found.returns_T[at_T])


def test_rows_and_turns_with_scattered_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="the tokens of some rows are not contiguous"):
        TokenRewards(torch.zeros(3), torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="the tokens of some turns are not contiguous"):
        TokenRewards(torch.zeros(3), torch.tensor([0, 0, 0]), turns_T=torch.tensor([0, 1, 0]))


@pytest.mark.parametrize(
    ("name", "lacks"), [("gae", "values"), ("turn_gae", "values"), ("turn_gae", "turns")]
)
def test_a_missing_input_of_an_estimator_is_named(name: str, lacks: str) -> None:
    assert settings_of(name).needs_values
    given = {f"{need}_T": torch.zeros(2) for need in {"values", "turns"} - {lacks}}
    tokens = TokenRewards(torch.zeros(2), torch.tensor([0, 0]), **given)
    with pytest.raises(ValueError, match=f"{name} needs the {lacks}"):
        settings_of(name).estimate(tokens)


def test_the_reward_of_a_row_is_on_its_last_trained_token() -> None:
    got = at_ends(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 0, 1, 2, 2]))
    assert got.tolist() == [0.0, 0.0, 1.0, 2.0, 0.0, 3.0]


def test_equal_values_are_whitened_to_exactly_0() -> None:
    for values in ([0.1] * 7, [3.0], []):
        assert whitened(torch.tensor(values)).tolist() == [0.0] * len(values)


def test_a_logprob_that_is_not_finite_changes_no_other_tokens_reward() -> None:
    lp_old_T = torch.tensor([-1.0, -torch.inf, -1.0])
    got = kl_in_reward(torch.ones(3), lp_old_T, torch.tensor([-2.0, -2.0, torch.nan]), beta=0.5)
    assert got.tolist() == [0.5, 1.0, 1.0]


def test_half_precision_is_cast_up() -> None:
    narrow = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    rows_T = torch.zeros(3, dtype=torch.int64)
    found = settings_of("gae").estimate(TokenRewards(narrow, rows_T, narrow))
    assert found.advantages_T.dtype == found.returns_T.dtype == torch.float64
    assert value_loss(narrow, narrow, found.returns_T, tokens_in_step=3).loss.dtype == torch.float64
    assert value_loss(narrow, narrow, narrow, tokens_in_step=3).loss.dtype == torch.float32


def test_advantages_are_clipped_to_the_bound() -> None:
    rows_T = torch.arange(3)
    wild_B = torch.tensor([-50.0, 0.5, 50.0], dtype=torch.float64)
    assert chosen_by("drgrpo").to_tokens(wild_B, rows_T, rows_T, bound=10.0).tolist() == [-10.0, 0.5, 10.0]
    assert chosen_by("drgrpo").to_tokens(wild_B, rows_T, rows_T).tolist() == wild_B.tolist()


@quick
@given(values=st.lists(st.tuples(*[st.floats(-4, 4, width=32)] * 3), min_size=2, max_size=12), data=st.data())
def test_the_critics_loss_is_the_sum_over_micro_batches(
    values: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(values) - 1))
    table_T = torch.tensor(values, dtype=torch.float64)
    whole = value_loss(*table_T.unbind(1), tokens_in_step=len(values)).loss
    parts = [
        value_loss(*each.unbind(1), tokens_in_step=len(values)).loss for each in torch.split(table_T, cut)
    ]
    same(whole, torch.stack(parts).sum())


def test_a_critic_without_a_clip_learns_its_error() -> None:
    values_T = torch.tensor([1.0, 5.0], requires_grad=True)
    found = value_loss(values_T, torch.zeros(2), torch.tensor([0.0, 9.0]), tokens_in_step=4, clip=None)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert values_T.grad is not None
    assert values_T.grad.tolist() == [0.25, -1.0]
    assert not found.clipped_T.any()


@quick
@given(batch=batches())
def test_only_groups_without_signal_have_no_advantage(batch: list[Rollout]) -> None:
    silent = groups_without_signal(Rollouts(tuple(batch)), tolerance=0.0)
    advantages = dict(zip([each.rollout_id for each in batch], score("drgrpo", batch).tolist(), strict=True))
    for group in {each.group_id for each in batch}:
        own = [advantages[each.rollout_id] for each in batch if each.group_id == group]
        assert any(own) == (group not in silent)
