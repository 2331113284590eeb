"""Several ranks as one learner: rank 0 leads, and the others do what it does, at the same time.

    rank 0    train.py ─▶ Leader ─ order ─┬─▶ its own Policy
    rank 1 …  follow() ◀──────────────────┴─▶ theirs, on their share of the micro-batches

Rank 0 alone knows of Redis and HTTP. A rank that dies breaks the next order or collective of all others: they
end, the launcher ends what is left, and the restart goes back to the checkpoint.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch

from trainer_service.model.layout import Layout
from trainer_service.model.policy import Policy
from trainer_service.model.universal import converted
from trainer_service.step.optimizer_step import Optimisation
from trainer_service.step.quarantine import has_finite_gradient
from trainer_service.step.step_request import StepRequest
from trainer_service.storage.disk import Parted

LONGEST_SILENCE = timedelta(days=365)
"""Between two orders: a trainer may wait for agents for days. The group that trains gives up in minutes."""


class Train(NamedTuple):
    """One optimizer step, with what was accumulated for it."""

    request: StepRequest


class Accumulate(NamedTuple):
    """Learn from groups of the next step."""

    request: StepRequest


class Forget(NamedTuple):
    """Drop what was learned from them."""


class Save(NamedTuple):
    """Write this rank's shards."""

    directory: Path
    tag: str


class Load(NamedTuple):
    """Read them back."""

    directory: Path
    tag: str
    universal: bool


class Export(NamedTuple):
    """Gather the weights, for rank 0 to write them."""


class Inspect(NamedTuple):
    """Say whether every weight is a number."""


class Probe(NamedTuple):
    """Say whether the gradient of these rows would be finite."""

    request: StepRequest


Order = Train | Accumulate | Forget | Save | Load | Export | Inspect | Probe | None
"""None: it is over."""


def own_rank() -> int:
    """As the launcher says; 0 without one."""
    return int(os.environ.get("RANK", "0"))


class Leader:
    """The policy of all ranks, as rank 0 uses it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        """Rank 0's own."""
        self._steps = Optimisation(policy, policy.value_clip)
        self._channel = _Channel(policy.ranks)
        self.vocab_size, self.ranks = policy.vocab_size, policy.ranks

    def optimise(self, request: StepRequest) -> dict[str, float]:
        """One optimizer step on all ranks, of these rows and those accumulated. Returns its metrics."""
        self._channel.send(Train(request.for_other_ranks()))
        return self._steps.step(request)

    def accumulate(self, request: StepRequest) -> None:
        """Learn on all ranks from some groups of the step that `optimise` will make with the others."""
        self._channel.send(Accumulate(request.for_other_ranks()))
        self._steps.accumulate(request)

    def forget(self) -> None:
        """Drop what was accumulated."""
        self._channel.send(Forget())
        self._steps.forget()

    def save(self, directory: Path, tag: str) -> None:
        """Returns when the shards of every rank are written.

        Raises Parted when this rank's are not, while others wait for it: only a restart brings them together.
        """
        self._channel.send(Save(directory, tag))
        try:
            self._policy.save(directory, tag)
        except Exception as error:
            if self._policy.ranks == 1:
                raise
            raise Parted("rank 0 could not write its shards; the others wait for them") from error

    @property
    def layout(self) -> Layout:
        """How the shards are cut."""
        return self._policy.layout

    def load(self, directory: Path, tag: str, layout: Layout | None) -> None:
        """Read back shards that were cut as `layout` says; None: as ours are. Those of other ranks or another
        stage are converted first, and the others wait for it without a limit.

        Raises LayoutRefused and NotConverted.
        """
        if layout is None or layout.loads_into(self.layout):
            self._load(directory, tag)
            return
        with converted(directory, tag) as aside:
            self._load(directory, aside, universal=True)

    def _load(self, directory: Path, tag: str, universal: bool = False) -> None:
        self._channel.send(Load(directory, tag, universal))
        self._policy.load(directory, tag, universal)

    def export(self, path: Path) -> None:
        self._channel.send(Export())
        self._policy.export(path)

    def sound(self, request: StepRequest) -> bool:
        """Whether the loss of this step has a gradient that is finite. Nothing is changed."""
        self._channel.send(Probe(request.for_other_ranks()))
        return has_finite_gradient(self._policy, request)

    def finite(self) -> bool:
        """Whether every weight of every rank is a number."""
        self._channel.send(Inspect())
        return self._policy.finite()

    def close(self) -> None:
        """Let the others end. Not after a failure: amid a collective of theirs they would not hear it."""
        self._channel.send(None)
        self._channel.close()


def follow(policy: Policy) -> None:
    """Do what the leader does until it says that it is over. Raises RuntimeError when the leader is gone."""
    channel, steps = _Channel(policy.ranks), Optimisation(policy, policy.value_clip)
    while (order := channel.receive()) is not None:
        match order:
            case Train(request):
                steps.step(request)
            case Accumulate(request):
                steps.accumulate(request)
            case Forget():
                steps.forget()
            case Save(directory, tag):
                policy.save(directory, tag)
            case Load(directory, tag, universal):
                policy.load(directory, tag, universal)
            case Export():
                policy.export(None)
            case Inspect():
                policy.finite()
            case Probe(request):
                has_finite_gradient(policy, request)
    channel.close()


class _Channel:
    """Orders from rank 0 to all others, on the CPU, whatever the device of the training is."""

    def __init__(self, ranks: int) -> None:
        self._group = (
            torch.distributed.new_group(backend="gloo", timeout=LONGEST_SILENCE) if ranks > 1 else None
        )

    def send(self, order: Order) -> None:
        if self._group is not None:
            torch.distributed.broadcast_object_list([order], src=0, group=self._group)

    def receive(self) -> Order:
        orders: list[Order] = [None]
        torch.distributed.broadcast_object_list(orders, src=0, group=self._group)
        return orders[0]

    def close(self) -> None:
        """Gloo's threads end with their groups; a process that ends before them is aborted."""
        if self._group is not None:
            torch.distributed.barrier(group=self._group)
            torch.distributed.destroy_process_group()
