"""All ranks as one: rank 0 broadcasts calls, and all ranks make them at the same time, each on its own part.

    rank 0    Ranks.call ─ call ─┬─▶ call.on(its own part)
    rank 1 …  follow ◀───────────┴─▶ call.on(theirs), on their share of the micro-batches

A call is an object. Only rank 0 speaks to Redis and HTTP. If a rank dies or falls silent, all others exit
(RankWatch), the launcher ends the processes that are left, and the restart loads the last checkpoint.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from trainer_service.model.checkpoint_layout import Layout, converted
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.model.host_copies import StateCopy, WeightSnapshot
from trainer_service.model.lora import AdapterSnapshot
from trainer_service.step.optimizer_step import OptimizerSteps
from trainer_service.step.quarantine import has_finite_gradient
from trainer_service.step.rank_communication import (
    CommandChannel,
    CopyWriter,
    RankThreads,
    RankWatch,
    ShareWriter,
    ShareWriters,
    SpreadCopy,
    SpreadSnapshot,
)
from trainer_service.step.step_parts import StepRequest, TurnRecord

logger = logging.getLogger(__name__)


class RankPart(Protocol):
    """What a rank has: its part of the policy, or of all models."""

    ranks: int
    rank_timeout_s: float


Part = TypeVar("Part", bound=RankPart)
Answer = TypeVar("Answer", covariant=True)


class RankCall(Generic[Part, Answer]):
    """A call that every rank makes on its own part. Each rank has its own answer."""

    kept: ClassVar[Literal["states", "weights"] | None] = None
    """What threads of all ranks write later, of the answers. Rank 0 goes on when all ranks have them."""

    def on(self, part: Part) -> Answer:
        raise NotImplementedError


class Ranks(Generic[Part]):
    """The parts of all ranks. Only rank 0 has an instance."""

    def __init__(self, part: Part) -> None:
        self.part = part
        """Rank 0's own."""
        self._channel = CommandChannel[RankCall[Part, object]](part.ranks)
        self._writers, self._copies = ShareWriters(part.ranks), RankThreads[Path, None](part.ranks)
        self._watch = RankWatch(part.ranks, part.rank_timeout_s)

    def call(self, call: RankCall[Part, Answer]) -> Answer:
        """Have all ranks make the call. Returns rank 0's answer."""
        self._channel.send(call)
        answer = call.on(self.part)
        if call.kept is not None:
            self._channel.wait_for_all()  # only then, threads of the other ranks may write their answers
        return answer

    def spread(self, call: RankCall[Part, StateCopy]) -> SpreadCopy:
        """Have all ranks copy their states. The copy is written while the training goes on, and before the
        next one is taken."""
        return SpreadCopy(self.call(call), self._copies)

    def require_shared(self, checkpoint_dir: Path) -> None:
        """Raises SystemExit, and ends the other ranks, if one of them cannot write rank 0's directory."""
        if lacking := self._writers.without(checkpoint_dir):
            self.close()
            raise SystemExit(
                f"trainer.checkpoint_dir: ranks {lacking} do not see rank 0's directory {checkpoint_dir}, or "
                "may not write there; each rank writes a part of a checkpoint, so all hosts must share it"
            )

    def close(self) -> None:
        """End the other ranks. Do not call this after a failure: a rank that waits in a collective receives
        no call."""
        self._writers.close()
        self._copies.close()
        self._channel.send(None)
        self._watch.close()
        self._channel.close()


def follow(part: Part) -> None:
    """Make rank 0's calls until it sends None. Raises RuntimeError if rank 0 is gone."""
    channel, writer = CommandChannel[RankCall[Part, object]](part.ranks), ShareWriter(part.ranks)
    copies = CopyWriter(part.ranks)
    watch = RankWatch(part.ranks, part.rank_timeout_s)
    while (call := channel.receive()) is not None:
        if call.kept == "states":
            copies.forget()
        answer = call.on(part)
        if isinstance(answer, StateCopy):
            copies.copy = answer
        elif isinstance(answer, WeightSnapshot):
            writer.snapshot = answer
        if call.kept is not None:
            channel.wait_for_all()
    writer.join()
    copies.join()
    watch.close()
    channel.close()


class PolicyRank:
    """One rank's part of the policy, and its optimizer steps."""

    def __init__(self, policy: DeepSpeedPolicy) -> None:
        self.policy, self.steps = policy, OptimizerSteps(policy, policy.value_clip)
        self.ranks, self.rank_timeout_s = policy.ranks, policy.rank_timeout_s


@dataclass(frozen=True)
class Train(RankCall[PolicyRank, dict[str, float]]):
    """Make one optimizer step from these rows and the accumulated gradients."""

    request: StepRequest

    def on(self, part: PolicyRank) -> dict[str, float]:
        return part.steps.step(self.request)


@dataclass(frozen=True)
class Accumulate(RankCall[PolicyRank, None]):
    """Add the gradient of some groups of the next step."""

    request: StepRequest

    def on(self, part: PolicyRank) -> None:
        part.steps.accumulate(self.request)


@dataclass(frozen=True)
class CheckGradient(RankCall[PolicyRank, bool]):
    """Compute whether the gradient of this step's loss is finite. Changes nothing."""

    request: StepRequest

    def on(self, part: PolicyRank) -> bool:
        return has_finite_gradient(part.policy, self.request)


class DiscardGradients(RankCall[PolicyRank, None]):
    """Drop the accumulated gradients."""

    def on(self, part: PolicyRank) -> None:
        part.steps.discard_gradients()


class CopyStates(RankCall[PolicyRank, StateCopy]):
    """Copy this rank's states into host memory."""

    kept = "states"

    def on(self, part: PolicyRank) -> StateCopy:
        return part.policy.copy_states()


@dataclass(frozen=True)
class Load(RankCall[PolicyRank, None]):
    """Read this rank's shards."""

    directory: Path
    tag: str
    universal: bool
    rate_scale: float

    def on(self, part: PolicyRank) -> None:
        part.policy.load(self.directory, self.tag, self.universal, self.rate_scale)


class TakeSnapshot(RankCall[PolicyRank, WeightSnapshot]):
    """Gather the weights, for rank 0 to copy them."""

    def on(self, part: PolicyRank) -> WeightSnapshot:
        return part.policy.snapshot()


class TakeShares(RankCall[PolicyRank, WeightSnapshot]):
    """Gather the weights, for every rank to copy its share."""

    kept = "weights"

    def on(self, part: PolicyRank) -> WeightSnapshot:
        return part.policy.snapshot(spread=True)


class TakeAdapterSnapshot(RankCall[PolicyRank, AdapterSnapshot]):
    """Gather the adapters, for rank 0 to copy them."""

    def on(self, part: PolicyRank) -> AdapterSnapshot:
        return part.policy.adapter_snapshot()


class CheckWeights(RankCall[PolicyRank, bool]):
    """Compute whether every weight of every rank is finite."""

    def on(self, part: PolicyRank) -> bool:
        return part.policy.weights_are_finite()


class MoveReference(RankCall[PolicyRank, None]):
    """Make the present weights the reference policy."""

    def on(self, part: PolicyRank) -> None:
        part.policy.move_reference()


class OffloadStates(RankCall[PolicyRank, None]):
    """Move this rank's weights and optimizer to host memory."""

    def on(self, part: PolicyRank) -> None:
        part.policy.offload_states()


class ReloadStates(RankCall[PolicyRank, None]):
    """Move them back to the device."""

    def on(self, part: PolicyRank) -> None:
        part.policy.reload_states()


class DistributedPolicy(Ranks[PolicyRank]):
    """The policy of all ranks. Each method is a call, which says what it does."""

    def __init__(self, policy: DeepSpeedPolicy, shared: Path | None = None) -> None:
        """If all ranks see the directory `shared`, each keeps a share of the snapshots, and writes it there.
        Otherwise, and without `shared`, rank 0 keeps the whole snapshots."""
        super().__init__(PolicyRank(policy))
        self._spread = policy.ranks > 1 and shared is not None and self._may_spread(shared)
        self.vocab_size, self.data_ranks = policy.vocab_size, policy.data_ranks
        self.model_checks, self.layout = policy.model_checks, policy.layout
        self.shares_prefixes = policy.shares_prefixes
        self.replayed_width = policy.routers.replayed_width if policy.routers else 0
        self.image_rule = policy.images.rule if policy.images else None

    def _may_spread(self, directory: Path) -> bool:
        if lacking := self._writers.without(directory):
            logger.warning(
                "ranks %s cannot use rank 0's directory %s, so rank 0 keeps and writes all weights of each "
                "version; with a directory that all hosts share, each rank keeps and writes a part",
                lacking,
                directory,
            )
        return not lacking

    def optimise(self, request: StepRequest) -> dict[str, float]:
        return self.call(Train(request))

    def accumulate(self, request: StepRequest) -> None:
        self.call(Accumulate(request))

    def gradient_is_finite(self, request: StepRequest) -> bool:
        return self.call(CheckGradient(request))

    def discard_gradients(self) -> None:
        self.call(DiscardGradients())

    @property
    def records(self) -> Sequence[TurnRecord]:
        """What the last step has used of each turn's tokens, if its request asked for it."""
        return self.part.steps.records

    def copy_states(self) -> SpreadCopy:
        return self.spread(CopyStates())

    def load(self, directory: Path, tag: str, layout: Layout | None, rate_scale: float = 1.0) -> None:
        """Read back shards that were saved with `layout`; None stands for this trainer's layout. Shards of
        another number of ranks or another ZeRO stage are converted first. Meanwhile the other ranks wait for
        the next call.

        Raises LayoutRefused if the shards cannot be converted, and NotConverted if the conversion failed.
        """
        if layout is None or layout.loads_into(self.layout):
            self.call(Load(directory, tag, universal=False, rate_scale=rate_scale))
            return
        with converted(directory, tag) as universal_tag:
            self.call(Load(directory, universal_tag, universal=True, rate_scale=rate_scale))

    def snapshot(self) -> WeightSnapshot:
        if not self._spread:
            return self.call(TakeSnapshot())
        own = self.call(TakeShares())
        return SpreadSnapshot(own.tensors, own.shares, own.rank, writers=self._writers)

    def adapter_snapshot(self) -> AdapterSnapshot:
        return self.call(TakeAdapterSnapshot())

    def move_reference(self) -> None:
        self.call(MoveReference())

    def offload_states(self) -> None:
        self.call(OffloadStates())

    def reload_states(self) -> None:
        self.call(ReloadStates())

    def weights_are_finite(self) -> bool:
        return self.call(CheckWeights())
