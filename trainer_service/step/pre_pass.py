"""What must be known of a batch before its first micro-batch learns, told to every rank.

    micro-batches ─ look ─▶ Look, … ─ of all ranks ─▶ survey ─▶ advantages of each, StepStatistics

Most recipes need none of it: then nothing is computed, and nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_service.algorithms.advantages.returns import (
    RETURNS,
    TokenRewards,
    at_ends,
    kl_in_reward,
    turn_discount,
)
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.step import StepStatistics, step_statistics
from trainer_service.algorithms.tokens import Tokens
from trainer_service.rows.rows import Ints, MicroBatch

Value = TypeVar("Value")


class Valuer(Protocol):
    """What a look needs of a critic."""

    def values(self, batch: MicroBatch) -> Tensor: ...


class Seer(Protocol):
    """What a look needs of a policy."""

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]: ...

    def reference(self, batch: MicroBatch) -> Tensor: ...

    @property
    def critic(self) -> "Valuer": ...

    def everybody(self, values: list[Value]) -> list[Value]: ...

    def tensor(self, values: Any) -> Tensor: ...


class Look(NamedTuple):
    """What a pass before the step says of the T trained tokens of a micro-batch; None where nobody asks."""

    lp_prox_T: Tensor | None
    lp_ref_T: Tensor | None
    values_T: Tensor | None
    """What the critic expected before the step."""
    fresh_T: Tensor
    """Which tokens are learned from, by their age."""


@dataclass(frozen=True)
class Survey:
    """What the whole step says to each of its micro-batches."""

    advantages: tuple[Tensor, ...]
    """[T] of each of this rank's micro-batches, float32."""
    returns: tuple[Tensor, ...]
    """The same, of what a critic learns; empty where there is none."""
    statistics: StepStatistics


class _Seen(NamedTuple):
    """A micro-batch as it travels between ranks."""

    batch: MicroBatch
    look: Look


@torch.no_grad()
def look(seer: Seer, batch: MicroBatch, version: int, algorithm: AlgorithmSettings) -> Look:
    return Look(
        fresh_T=seer.tensor(fresh(batch.versions_T, version, algorithm)),
        lp_prox_T=seer.logprobs(batch)[0] if algorithm.looks_first else None,
        lp_ref_T=seer.reference(batch) if algorithm.wants_reference else None,
        values_T=seer.critic.values(batch) if algorithm.needs_critic else None,
    )


@torch.no_grad()
def survey(
    seer: Seer,
    share: Sequence[tuple[MicroBatch, bool]],
    looks: Sequence[Look],
    algorithm: AlgorithmSettings,
) -> Survey:
    """`share` is this rank's, with False for what is there for the number alone."""
    if not (algorithm.credits_tokens or algorithm.whole_step):
        return Survey(tuple(seer.tensor(batch.advantages_T) for batch, _ in share), (), StepStatistics())
    own = [_Seen(batch, _cpu(look)) for (batch, counts), look in zip(share, looks, strict=True) if counts]
    step = _joined(seer.everybody(own))
    returns_T = None
    if algorithm.credits_tokens:
        step, returns_T = _credited(step, algorithm)
    statistics = step_statistics(_tokens(step), algorithm) if algorithm.whole_step else StepStatistics()
    first_R = np.searchsorted(step.rows_T.numpy(), np.arange(int(step.rows_T.max()) + 1))
    places = [first_R[batch.rows_T] + _within(batch.rows_T) for batch, _ in share]

    def parted(values_T: Tensor | None) -> tuple[Tensor, ...]:
        return () if values_T is None else tuple(seer.tensor(values_T.numpy()[at_T]) for at_T in places)

    return Survey(parted(step.advantages_T), parted(returns_T), statistics)


@dataclass(frozen=True)
class _Step:
    """Every trained token of the step, row after row."""

    rows_T: Tensor
    turns_T: Tensor
    """Counted over the whole step."""
    rewards_T: Tensor
    lp_roll_T: Tensor
    advantages_T: Tensor
    lp_prox_T: Tensor | None
    lp_ref_T: Tensor | None
    values_T: Tensor | None
    fresh_T: Tensor


def fresh(versions_T: Ints, version: int, algorithm: AlgorithmSettings) -> NDArray[np.bool_]:
    """Which tokens are learned from, by their age alone."""
    return (algorithm.stale != "mask") | (version - versions_T <= algorithm.max_staleness)


def _joined(seen: Sequence[_Seen]) -> _Step:
    rows_T = torch.cat([torch.from_numpy(each.batch.rows_T) for each in seen])
    order_T = rows_T.argsort(stable=True)

    def joined(parts: Sequence[Any]) -> Tensor:
        return torch.cat([torch.as_tensor(part) for part in parts])[order_T]

    def looked(name: str) -> Tensor | None:
        parts = [getattr(each.look, name) for each in seen]
        return None if any(part is None for part in parts) else joined(parts)

    turns_T = joined([each.batch.turns_T for each in seen])
    rows_T = rows_T[order_T]
    _, turns_T = torch.unique_consecutive(torch.stack([rows_T, turns_T]), dim=1, return_inverse=True)
    return _Step(
        rows_T=rows_T,
        turns_T=turns_T,
        rewards_T=joined([each.batch.rewards_T for each in seen]),
        lp_roll_T=joined([each.batch.logprobs_T for each in seen]),
        advantages_T=joined([each.batch.advantages_T for each in seen]),
        lp_prox_T=looked("lp_prox_T"),
        lp_ref_T=looked("lp_ref_T"),
        values_T=looked("values_T"),
        fresh_T=joined([each.look.fresh_T for each in seen]),
    )


def _credited(step: _Step, algorithm: AlgorithmSettings) -> tuple[_Step, Tensor]:
    """The step with the advantage of each token, from what it and those after it were rewarded; and the
    returns."""
    shaping = algorithm.shaping
    rewards_T, owners_T = step.rewards_T.double(), step.rows_T
    if shaping.turn_discount is not None:
        rewards_T, owners_T = _discounted(step, shaping.turn_discount), step.turns_T
    if shaping.kl_in_reward:
        assert step.lp_prox_T is not None  # noqa: S101 - `looks_first`
        assert step.lp_ref_T is not None  # noqa: S101 - `wants_reference`
        rewards_T = kl_in_reward(rewards_T, step.lp_prox_T, step.lp_ref_T, beta=shaping.kl_in_reward)
    tokens = TokenRewards(rewards_T, owners_T, values_T=step.values_T, turns_T=step.turns_T)
    found = RETURNS[algorithm.advantage.name].estimate(tokens, algorithm.advantage)
    advantages_T, bound = found.advantages_T.float(), algorithm.advantage_bound
    if bound is not None:
        advantages_T = advantages_T.clamp(-bound, bound)
    return replace(step, advantages_T=advantages_T), found.returns_T.float()


def _discounted(step: _Step, discount: float) -> Tensor:
    """Each turn stands alone, and its last token gets what it and the turns after it were rewarded."""
    turns = int(step.turns_T.max()) + 1
    rewards_K = torch.zeros(turns, dtype=torch.float64)
    rewards_K.index_add_(0, step.turns_T, step.rewards_T.double())
    row_K = torch.zeros(turns, dtype=torch.int64).index_copy_(0, step.turns_T, step.rows_T)
    for row in sorted(set(row_K.tolist())):
        of_row_K = row_K == row
        told = turn_discount(rewards_K[of_row_K].tolist(), discount=discount)
        rewards_K[of_row_K] = torch.tensor(told, dtype=torch.float64)
    return at_ends(rewards_K, step.turns_T)


def _tokens(step: _Step) -> Tokens:
    assert step.lp_prox_T is not None  # noqa: S101 - `looks_first`
    return Tokens(
        lp_new_T=step.lp_prox_T,
        lp_prox_T=step.lp_prox_T,
        lp_roll_T=step.lp_roll_T,
        advantages_T=step.advantages_T,
        rows_T=step.rows_T,
        fresh_T=step.fresh_T,
    )


def _within(rows_T: Ints) -> Ints:
    """The number of each token within its row; the tokens of a row are together."""
    starts_T = np.flatnonzero(np.diff(rows_T, prepend=-1))
    lengths = np.diff(np.append(starts_T, len(rows_T)))
    return np.arange(len(rows_T)) - np.repeat(starts_T, lengths)


def _cpu(look: Look) -> Look:
    told: dict[str, Any] = {
        name: None if values_T is None else values_T.cpu() for name, values_T in look._asdict().items()
    }
    return Look(**told)
