"""Makes the forward passes before the first backward pass of a step, and computes its statistics.

    micro-batches ─ pre_pass ─▶ PrePass, … ─ of all ranks ─▶ step_context ─▶ advantages, StepStatistics

Most recipes need no such pass and no statistics. Then the ranks compute and exchange nothing here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_service.algorithms.policy_loss import step_statistics
from trainer_service.algorithms.returns import (
    TokenAdvantage,
    TokenRewards,
    at_ends,
    kl_in_reward,
    turn_discount,
)
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.sums import Sums
from trainer_service.algorithms.tokens import Tokens
from trainer_service.algorithms.turn_losses import StepStatistics
from trainer_service.model.forward import TokenScores
from trainer_service.model.routers import Routers, mean_load
from trainer_service.rows.rows import Ints, MicroBatch

Value = TypeVar("Value")


class TrainableCritic(Protocol):
    """What a step needs of a critic."""

    def values(self, batch: MicroBatch) -> Tensor: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> float: ...


class TrainablePolicy(Protocol):
    """What a step needs of one rank's policy, which may be one without a model."""

    @property
    def ranks(self) -> int: ...

    @property
    def shares_prefixes(self) -> bool: ...

    @property
    def learning_rate(self) -> float: ...

    def own_micro_batches(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]: ...

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]: ...

    def scores(self, batch: MicroBatch) -> TokenScores: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self, scale: float = 1.0) -> float: ...

    def discard_gradients(self) -> None: ...

    def reference(self, batch: MicroBatch) -> Tensor: ...

    @property
    def critic(self) -> TrainableCritic: ...

    @property
    def routers(self) -> Routers | None: ...

    def all_gather(self, values: list[Value]) -> list[Value]: ...

    def tensor(self, values: Any) -> Tensor: ...


class PrePass(NamedTuple):
    """Values of a micro-batch's T trained tokens before the step; None for those that the algorithm does not
    need."""

    lp_prox_T: Tensor | None
    """Log-probabilities under the weights before the step, in nats."""
    lp_ref_T: Tensor | None
    """Log-probabilities under the reference policy, in nats."""
    values_T: Tensor | None
    """The critic's values, in units of the reward."""
    fresh_T: Tensor
    """bool: which tokens are young enough to be learned from."""
    routing: Sums | None = None
    """The sums over the routing of all of the micro-batch's tokens."""


@dataclass(frozen=True)
class StepContext:
    """Values for this rank's micro-batches that may depend on the whole step."""

    advantages: tuple[Tensor, ...]
    """One float32 tensor [T] for each of this rank's micro-batches."""
    returns: tuple[Tensor, ...]
    """The critic's targets, one float32 tensor [T] for each micro-batch; empty without a critic."""
    statistics: StepStatistics

    def part(self, start: int, end: int) -> "StepContext":
        """The values for the micro-batches from number `start` to before `end`."""
        return replace(self, advantages=self.advantages[start:end], returns=self.returns[start:end])


class _PassedBatch(NamedTuple):
    """A micro-batch and its pre-pass, as ranks exchange them."""

    batch: MicroBatch
    values: PrePass


@torch.no_grad()
def pre_pass(
    policy: TrainablePolicy, batch: MicroBatch, version: int, algorithm: AlgorithmSettings
) -> PrePass:
    """Make the forward passes over one micro-batch that the algorithm needs, if any. `version` is the version
    of the present weights."""
    lp_prox_T = policy.logprobs(batch)[0] if algorithm.needs_pre_pass else None
    balanced = policy.routers if algorithm.router_aux_loss else None
    return PrePass(
        fresh_T=policy.tensor(fresh(batch.versions_T, version, algorithm)),
        routing=None if balanced is None else balanced.sums(),
        lp_prox_T=lp_prox_T,
        lp_ref_T=policy.reference(batch) if algorithm.needs_reference_logprobs else None,
        values_T=policy.critic.values(batch) if algorithm.needs_critic else None,
    )


@torch.no_grad()
def step_context(
    policy: TrainablePolicy,
    share: Sequence[tuple[MicroBatch, bool]],
    pre_passes: Sequence[PrePass],
    algorithm: AlgorithmSettings,
) -> StepContext:
    """Gather the pre-passes of all ranks, and compute advantages and statistics of the whole step.

    `share` is as in `StepPart`; the step does not contain what is marked False there. Every rank must call
    this function.
    """
    if not (algorithm.credits_tokens or algorithm.whole_step):
        advantages = tuple(policy.tensor(batch.advantages_T) for batch, _ in share)
        return StepContext(advantages, (), StepStatistics())
    own = [
        _PassedBatch(batch, _cpu(values))
        for (batch, counts), values in zip(share, pre_passes, strict=True)
        if counts
    ]
    step = _joined(policy.all_gather(own))
    returns_T = None
    if algorithm.credits_tokens:
        step, returns_T = _credited(step, algorithm)
    statistics = step_statistics(_tokens(step), algorithm) if algorithm.whole_step else StepStatistics()
    first_R = np.searchsorted(step.rows_T.numpy(), np.arange(int(step.rows_T.max()) + 1))
    places = [first_R[batch.rows_T] + _within(batch.rows_T) for batch, _ in share]

    def parted(values_T: Tensor | None) -> tuple[Tensor, ...]:
        return () if values_T is None else tuple(policy.tensor(values_T.numpy()[at_T]) for at_T in places)

    return StepContext(parted(step.advantages_T), parted(returns_T), statistics)


def expert_load(
    policy: TrainablePolicy, share: Sequence[tuple[MicroBatch, bool]], pre_passes: Sequence[PrePass]
) -> Tensor:
    """[E]: the `mean_load` of these micro-batches of all ranks. Every rank must call this function."""
    measured = zip(share, pre_passes, strict=True)
    own = [each.routing for (_, counts), each in measured if counts and each.routing is not None]
    return policy.tensor(mean_load(Sums.joined(policy.all_gather(own))).numpy())


@dataclass(frozen=True)
class _StepTokens:
    """All T trained tokens of the step, from all ranks, row after row."""

    rows_T: Tensor
    turns_T: Tensor
    """The turn of each token, numbered over the whole step."""
    rewards_T: Tensor
    lp_roll_T: Tensor
    advantages_T: Tensor
    lp_prox_T: Tensor | None
    lp_ref_T: Tensor | None
    values_T: Tensor | None
    fresh_T: Tensor


def fresh(versions_T: Ints, version: int, algorithm: AlgorithmSettings) -> NDArray[np.bool_]:
    """See `PrePass.fresh_T`. `version` is that of the present weights."""
    return (algorithm.stale != "mask") | (versions_T >= algorithm.oldest_allowed(version))


def _joined(passed: Sequence[_PassedBatch]) -> _StepTokens:
    rows_T = torch.cat([torch.from_numpy(each.batch.rows_T) for each in passed])
    order_T = rows_T.argsort(stable=True)

    def joined(parts: Sequence[Any]) -> Tensor:
        return torch.cat([torch.as_tensor(part) for part in parts])[order_T]

    def joined_pre_pass(name: str) -> Tensor | None:
        parts = [getattr(each.values, name) for each in passed]
        return None if any(part is None for part in parts) else joined(parts)

    turns_T = joined([each.batch.turns_T for each in passed])
    rows_T = rows_T[order_T]
    _, turns_T = torch.unique_consecutive(torch.stack([rows_T, turns_T]), dim=1, return_inverse=True)
    return _StepTokens(
        rows_T=rows_T,
        turns_T=turns_T,
        rewards_T=joined([each.batch.rewards_T for each in passed]),
        lp_roll_T=joined([each.batch.logprobs_T for each in passed]),
        advantages_T=joined([each.batch.advantages_T for each in passed]),
        lp_prox_T=joined_pre_pass("lp_prox_T"),
        lp_ref_T=joined_pre_pass("lp_ref_T"),
        values_T=joined_pre_pass("values_T"),
        fresh_T=joined([each.values.fresh_T for each in passed]),
    )


def _credited(step: _StepTokens, algorithm: AlgorithmSettings) -> tuple[_StepTokens, Tensor]:
    """Compute an advantage for each token, from the rewards of this and all later tokens of its row. Returns
    the step with these advantages, and the returns [T], float32."""
    shaping = algorithm.shaping
    rewards_T, owners_T = step.rewards_T.double(), step.rows_T
    if shaping.turn_discount is not None:
        rewards_T, owners_T = _discounted(step, shaping.turn_discount), step.turns_T
    if shaping.kl_in_reward:
        assert step.lp_prox_T is not None  # noqa: S101 - `needs_pre_pass`
        assert step.lp_ref_T is not None  # noqa: S101 - `needs_reference_logprobs`
        rewards_T = kl_in_reward(rewards_T, step.lp_prox_T, step.lp_ref_T, beta=shaping.kl_in_reward)
    tokens = TokenRewards(rewards_T, owners_T, values_T=step.values_T, turns_T=step.turns_T)
    assert isinstance(algorithm.advantage, TokenAdvantage)  # noqa: S101 - `credits_tokens`
    found = algorithm.advantage.estimate(tokens)
    advantages_T, bound = found.advantages_T.float(), algorithm.advantage_bound
    if bound is not None:
        advantages_T = advantages_T.clamp(-bound, bound)
    return replace(step, advantages_T=advantages_T), found.returns_T.float()


def _discounted(step: _StepTokens, discount: float) -> Tensor:
    """[T] float64: the last token of each turn gets the turn's reward plus the discounted rewards of the
    later turns of its row; all other tokens get 0."""
    turns = int(step.turns_T.max()) + 1
    rewards_K = torch.zeros(turns, dtype=torch.float64)
    rewards_K.index_add_(0, step.turns_T, step.rewards_T.double())
    row_K = torch.zeros(turns, dtype=torch.int64).index_copy_(0, step.turns_T, step.rows_T)
    for row in sorted(set(row_K.tolist())):
        of_row_K = row_K == row
        discounted = turn_discount(rewards_K[of_row_K].tolist(), discount=discount)
        rewards_K[of_row_K] = torch.tensor(discounted, dtype=torch.float64)
    return at_ends(rewards_K, step.turns_T)


def _tokens(step: _StepTokens) -> Tokens:
    assert step.lp_prox_T is not None  # noqa: S101 - `needs_pre_pass`
    return Tokens(
        lp_new_T=step.lp_prox_T,
        lp_prox_T=step.lp_prox_T,
        lp_roll_T=step.lp_roll_T,
        advantages_T=step.advantages_T,
        rows_T=step.rows_T,
        fresh_T=step.fresh_T,
    )


def _within(rows_T: Ints) -> Ints:
    """The number of each token within its row, from 0. The tokens of a row are consecutive."""
    starts_T = np.flatnonzero(np.diff(rows_T, prepend=-1))
    lengths = np.diff(np.append(starts_T, len(rows_T)))
    return np.arange(len(rows_T)) - np.repeat(starts_T, lengths)


def _cpu(values: PrePass) -> PrePass:
    def moved(values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else values_T.cpu()

    return PrePass(
        lp_prox_T=moved(values.lp_prox_T),
        lp_ref_T=moved(values.lp_ref_T),
        values_T=moved(values.values_T),
        fresh_T=values.fresh_T.cpu(),
    )
