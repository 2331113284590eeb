"""Makes the parts of a step that learn one after another, each after its passes before the step.

rows ─ mini_batches ─ packed_rows ─ own share ─▶ pre_pass ─ step_context ─▶ StepPart, …

A part has the groups that arrived together. With `mini_batches`, it has one mini-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from trainer_service.algorithms.aggregation import StepCounts, divisor
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.sums import Sums
from trainer_service.rows.mini_batches import mini_batches, packed_rows
from trainer_service.rows.rows import MicroBatch, Row
from trainer_service.step.pre_pass import (
    PrePass,
    PrePassPolicy,
    StepContext,
    expert_load,
    pre_pass,
    step_context,
)
from trainer_service.step.step_request import StepRequest
from trainer_service.step.token_records import LearnedTokens


class SharingPolicy(PrePassPolicy, Protocol):
    """What the parts of a step need of one rank's policy."""

    @property
    def shares_prefixes(self) -> bool: ...

    def own_micro_batches(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]: ...


@dataclass
class StepPart:
    """Some rows of a step, and this rank's share of their micro-batches."""

    share: Sequence[tuple[MicroBatch, bool]]
    """False marks a micro-batch that only keeps the number of passes equal on all ranks."""
    rows_before: int
    """How many rows the step has before those over which the rows of these micro-batches are numbered."""
    pre_passes: Sequence[PrePass]
    context: StepContext
    load_E: Tensor | None
    """The `mean_load` of the part's tokens; None without an auxiliary loss of the routers."""
    counts: StepCounts
    computed: int
    """The tokens of the micro-batches of all ranks, in which a shared prefix is once."""
    diagnostics: Sequence[Sums] = ()
    """The diagnostics of its micro-batches, from the last pass that computed gradients."""
    learned: Sequence[LearnedTokens] | None = None
    """The tokens of its micro-batches, from the first pass that computed gradients; None before it."""

    def divisor(self, algorithm: AlgorithmSettings) -> int:
        return divisor(self.counts, algorithm.aggregation)

    def in_step(self, share: float) -> list[Sums]:
        """The diagnostics, with `share` as the weight of this part's loss in the loss of the step."""
        return [
            replace(each, totals={**each.totals, "loss": each.totals["loss"] * share})
            for each in self.diagnostics
        ]


def step_parts(policy: SharingPolicy, request: StepRequest, rows_before: int = 0) -> list[StepPart]:
    """The rows of the request as one part, or as one for each mini-batch. Makes the passes that precede the
    first update. The step has `rows_before` rows before these. Every rank must call this function."""
    rows, algorithm = request.rows, request.algorithm
    homes = mini_batches(rows, algorithm.mini_batches)
    most, shares_prefixes = algorithm.micro_batch_tokens, policy.shares_prefixes
    packed = [packed_rows(rows, at, most, shares_prefixes) for at in homes]
    shares = [policy.own_micro_batches(batches) for batches in packed]
    pre_passes = []
    for batch, _ in chain(*shares):
        pre_passes.append(pre_pass(policy, batch, request.version, algorithm))
        request.beat()
    context = step_context(policy, list(chain(*shares)), pre_passes, algorithm)
    counts, parts, end = counts_of(rows), [], 0
    for at, batches, share in zip(homes, packed, shares, strict=True):
        start, end = end, end + len(share)
        passed = pre_passes[start:end]
        load_E = expert_load(policy, share, passed) if algorithm.router_aux_loss else None
        computed = sum(len(batch.ids_N) for batch in batches)
        own = counts.of_rows(torch.from_numpy(at))
        part_context = context.part(start, end)
        parts.append(StepPart(share, rows_before, passed, part_context, load_E, own, computed))
    return parts


def counts_of(rows: Sequence[Row]) -> StepCounts:
    """The counts of a step's rows, or of a part of them. All rows of a session are one rollout."""
    return StepCounts(
        tokens_R=torch.tensor([row.trained_tokens for row in rows]),
        rollout_R=_numbered([row.session_id for row in rows]),
        group_R=_numbered([row.group_id for row in rows]),
    )


def _numbered(names: Sequence[str]) -> Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)
