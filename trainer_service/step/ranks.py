"""Several ranks as one policy: rank 0 broadcasts commands, and all ranks carry them out at the same time.

    rank 0    train.py ─▶ DistributedPolicy ─ command ─┬─▶ its own DeepSpeedPolicy
    rank 1 …  follow() ◀───────────────────────────────┴─▶ theirs, on their share of the micro-batches

Only rank 0 speaks to Redis and HTTP. If a rank dies or falls silent, all others exit (rank_watch), the
launcher ends the processes that are left, and the restart loads the last checkpoint.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainer_service.model.checkpoint_layout import Layout, converted
from trainer_service.model.lora import AdapterSnapshot
from trainer_service.model.policy import DeepSpeedPolicy
from trainer_service.model.snapshot import WeightSnapshot
from trainer_service.step.optimizer_step import OptimizerSteps
from trainer_service.step.quarantine import has_finite_gradient
from trainer_service.step.rank_communication import CommandChannel, RankThreads, RankWatch
from trainer_service.step.rank_writers import (
    CopyWriter,
    ShareWriter,
    ShareWriters,
    SpreadCopy,
    SpreadSnapshot,
)
from trainer_service.step.step_parts import StepRequest, TurnRecord

logger = logging.getLogger(__name__)


class Train(NamedTuple):
    """Make one optimizer step from these rows and the accumulated gradients."""

    request: StepRequest


class Accumulate(NamedTuple):
    """Add the gradient of some groups of the next step."""

    request: StepRequest


class DiscardGradients(NamedTuple):
    """Drop the accumulated gradients."""


class CopyStates(NamedTuple):
    """Copy this rank's states into host memory."""


class Load(NamedTuple):
    """Read this rank's shards."""

    directory: Path
    tag: str
    universal: bool
    rate_scale: float


class TakeSnapshot(NamedTuple):
    """Gather the weights, for rank 0 to copy them, or for every rank to copy its share (`spread`)."""

    spread: bool


class TakeAdapterSnapshot(NamedTuple):
    """Gather the adapters, for rank 0 to copy them."""


class CheckWeights(NamedTuple):
    """Compute whether every weight is finite."""


class MoveReference(NamedTuple):
    """Make the present weights the reference policy."""


class OffloadStates(NamedTuple):
    """Move this rank's weights and optimizer to host memory."""


class ReloadStates(NamedTuple):
    """Move them back to the device."""


class CheckGradient(NamedTuple):
    """Compute whether the gradient of these rows is finite."""

    request: StepRequest


Command = (
    Train
    | Accumulate
    | DiscardGradients
    | CopyStates
    | Load
    | TakeSnapshot
    | TakeAdapterSnapshot
    | CheckWeights
    | CheckGradient
    | MoveReference
    | OffloadStates
    | ReloadStates
)


class DistributedPolicy:
    """The policy of all ranks. Only rank 0 has an instance. A method that needs the other ranks first sends
    them its command."""

    def __init__(self, policy: DeepSpeedPolicy, shared: Path | None = None) -> None:
        """If all ranks see the directory `shared`, each keeps a share of the snapshots, and writes it there.
        Otherwise, and without `shared`, rank 0 keeps the whole snapshots."""
        self._policy = policy
        """Rank 0's own part."""
        self._steps = OptimizerSteps(policy, policy.value_clip)
        self._channel = CommandChannel[Command](policy.ranks)
        self._writers, self._copies = ShareWriters(policy.ranks), RankThreads[Path, None](policy.ranks)
        self._watch = RankWatch(policy.ranks, policy.rank_timeout_s)
        self._spread = policy.ranks > 1 and shared is not None and self._may_spread(shared)
        self.vocab_size, self.data_ranks = policy.vocab_size, policy.data_ranks
        self.model_checks = policy.model_checks
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

    def require_shared(self, checkpoint_dir: Path) -> None:
        """Raises SystemExit, and ends the other ranks, if one of them cannot write rank 0's directory."""
        if lacking := self._writers.without(checkpoint_dir):
            self.close()
            raise SystemExit(
                f"trainer.checkpoint_dir: ranks {lacking} do not see rank 0's directory {checkpoint_dir}, or "
                "may not write there; each rank writes a part of a checkpoint, so all hosts must share it"
            )

    def optimise(self, request: StepRequest) -> dict[str, float]:
        """Make one optimizer step from these rows and the accumulated gradients. Returns its metrics by
        name."""
        self._channel.send(Train(request.for_other_ranks()))
        return self._steps.step(request)

    @property
    def records(self) -> Sequence[TurnRecord]:
        """What the last step has used of each turn's tokens, if its request asked for it."""
        return self._steps.records

    def accumulate(self, request: StepRequest) -> None:
        """Add the gradient of some groups of the next step, which `optimise` makes."""
        self._channel.send(Accumulate(request.for_other_ranks()))
        self._steps.accumulate(request)

    def discard_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self._channel.send(DiscardGradients())
        self._steps.discard_gradients()

    def copy_states(self) -> SpreadCopy:
        """Copy the states of every rank into host memory. The copy is written while the training goes on,
        and before the next one is taken."""
        self._channel.send(CopyStates())
        own = self._policy.copy_states()
        self._channel.wait_for_all()  # only then, threads of the other ranks may write the copy
        return SpreadCopy(own, self._copies)

    @property
    def layout(self) -> Layout:
        """How this trainer's checkpoints are sharded."""
        return self._policy.layout

    def load(self, directory: Path, tag: str, layout: Layout | None, rate_scale: float = 1.0) -> None:
        """Read back shards that were saved with `layout`; None stands for this trainer's layout. Shards of
        another number of ranks or another ZeRO stage are converted first. Meanwhile the other ranks wait for
        the next command. The learning rate becomes `rate_scale` times the configured one.

        Raises LayoutRefused if the shards cannot be converted, and NotConverted if the conversion failed.
        """
        if layout is None or layout.loads_into(self.layout):
            self._load(Load(directory, tag, universal=False, rate_scale=rate_scale))
            return
        with converted(directory, tag) as universal_tag:
            self._load(Load(directory, universal_tag, universal=True, rate_scale=rate_scale))

    def _load(self, command: Load) -> None:
        self._channel.send(command)
        self._policy.load(*command)

    def snapshot(self) -> WeightSnapshot:
        """Copy all weights into the memory of rank 0's host, or a share of them on every rank."""
        self._channel.send(TakeSnapshot(self._spread))
        own = self._policy.snapshot(self._spread)
        if not self._spread:
            return own
        self._channel.wait_for_all()  # only then, threads of the other ranks may write the snapshot
        return SpreadSnapshot(own.tensors, own.shares, own.rank, writers=self._writers)

    def adapter_snapshot(self) -> AdapterSnapshot:
        """Copy the adapters alone into the memory of rank 0's host."""
        self._channel.send(TakeAdapterSnapshot())
        return self._policy.adapter_snapshot()

    def move_reference(self) -> None:
        """The reference policy becomes the policy of now."""
        self._channel.send(MoveReference())
        self._policy.move_reference()

    def offload_states(self) -> None:
        """Move the weights and optimizers of all ranks to host memory."""
        self._channel.send(OffloadStates())
        self._policy.offload_states()

    def reload_states(self) -> None:
        """Move them back to the devices."""
        self._channel.send(ReloadStates())
        self._policy.reload_states()

    def gradient_is_finite(self, request: StepRequest) -> bool:
        """Whether the gradient of this step's loss is finite. Changes nothing."""
        self._channel.send(CheckGradient(request.for_other_ranks()))
        return has_finite_gradient(self._policy, request)

    def weights_are_finite(self) -> bool:
        """Whether every weight of every rank is finite."""
        self._channel.send(CheckWeights())
        return self._policy.weights_are_finite()

    def close(self) -> None:
        """End the other ranks. Do not call this after a failure: a rank that waits in a collective receives
        no command."""
        self._writers.close()
        self._copies.close()
        self._channel.send(None)
        self._watch.close()
        self._channel.close()


def follow(policy: DeepSpeedPolicy) -> None:
    """Carry out rank 0's commands until it sends None. Raises RuntimeError if rank 0 is gone."""
    steps = OptimizerSteps(policy, policy.value_clip)
    channel, writer = CommandChannel[Command](policy.ranks), ShareWriter(policy.ranks)
    copies = CopyWriter(policy.ranks)
    watch = RankWatch(policy.ranks, policy.rank_timeout_s)
    while (command := channel.receive()) is not None:
        match command:
            case Train(request):
                steps.step(request)
            case Accumulate(request):
                steps.accumulate(request)
            case DiscardGradients():
                steps.discard_gradients()
            case CopyStates():
                copies.forget()
                copies.copy = policy.copy_states()
                channel.wait_for_all()
            case Load():
                policy.load(*command)
            case TakeSnapshot(spread):
                writer.snapshot = policy.snapshot(spread)
                if spread:
                    channel.wait_for_all()
            case TakeAdapterSnapshot():
                policy.adapter_snapshot()
            case CheckWeights():
                policy.weights_are_finite()
            case MoveReference():
                policy.move_reference()
            case OffloadStates():
                policy.offload_states()
            case ReloadStates():
                policy.reload_states()
            case CheckGradient(request):
                has_finite_gradient(policy, request)
    writer.join()
    copies.join()
    watch.close()
    channel.close()
