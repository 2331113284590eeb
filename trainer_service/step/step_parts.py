"""Makes the parts of a step that learn one after another, each after its passes before the step.

StepRequest ─ mini_batches ─ packed_rows ─ own share ─▶ pre_pass ─ step_context ─▶ StepPart, …
micro-batch ─ LearnedTokens ─▶ the rank's own turns ─ turn_records ─▶ TurnRecord, … of all ranks

A part has the groups that arrived together. With `mini_batches`, it has one mini-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_queue.contract.packed_tokens import TrainedTokens
from trainer_service.algorithms.aggregation import StepCounts, divisor
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.sums import Sums
from trainer_service.rows.rows import Ints, MicroBatch, Row, micro_batches
from trainer_service.settings import RecordedTokens
from trainer_service.step.pre_pass import (
    PrePass,
    StepContext,
    TrainablePolicy,
    expert_load,
    pre_pass,
    step_context,
)

LARGEST = float(np.finfo(np.float16).max)


class LearnedTokens(NamedTuple):
    """The T trained tokens of a micro-batch, row after row. Tensors may be on the device."""

    rows_T: Ints
    """The row of each token, numbered over all rows of the step."""
    turns_T: Ints
    """The turn of each token, numbered within the row's branch."""
    advantages_T: Tensor | None
    """float32, as the loss has used them; None if it uses none."""
    log_rho_T: Tensor | None
    """Log-probability under the weights before the step minus the engine's, in nats."""


class TurnRecord(NamedTuple):
    """The packed `TrainedTokens` of one turn."""

    session_id: str
    turn_id: str
    packed: bytes


def turn_records(learned: LearnedTokens, rows: Sequence[Row]) -> Iterator[TurnRecord]:
    """The records of the turns in a micro-batch. `rows` are all rows of the step."""
    if not len(learned.rows_T):
        return
    advantages_T = None if learned.advantages_T is None else learned.advantages_T.float().cpu().numpy()
    ratios_T = None
    if learned.log_rho_T is not None:
        ratios_T = np.exp(np.minimum(learned.log_rho_T.float().cpu().numpy(), np.log(LARGEST)))
    changes_T = (np.diff(learned.rows_T) != 0) | (np.diff(learned.turns_T) != 0)
    ends = [0, *(np.flatnonzero(changes_T) + 1).tolist(), len(learned.rows_T)]
    before, place = -1, 0
    for start, end in pairwise(ends):
        number = int(learned.rows_T[start])
        place = place + 1 if number == before else 0
        before, row = number, rows[number]
        packed_advantages = packed_ratios = None
        if advantages_T is not None:
            own_T = advantages_T[start:end]
            packed_advantages = (own_T[:1] if (own_T == own_T[0]).all() else own_T).astype("<f4").tobytes()
        if ratios_T is not None:
            packed_ratios = ratios_T[start:end].astype("<f2").tobytes()
        tokens = TrainedTokens(end - start, packed_advantages, packed_ratios)
        yield TurnRecord(row.session_id, row.turn_ids[place], tokens.pack())


def _no_beat() -> None: ...


@dataclass(frozen=True)
class StepRequest:
    """The rows to train, and the settings of the algorithm."""

    rows: Sequence[Row]
    version: int
    """That of the weights before the step; all parts of one step have the same."""
    algorithm: AlgorithmSettings
    beat: Callable[[], None] = _no_beat
    """Called between micro-batches, so that a long step still reports that the trainer is alive."""
    recorded: RecordedTokens = "none"
    """What is recorded of each trained token."""

    def with_rows(self, rows: Sequence[Row]) -> "StepRequest":
        return replace(self, rows=rows)

    def __getstate__(self) -> dict[str, object]:
        """What travels to other ranks: no `beat`, because only rank 0 reports progress."""
        return {**self.__dict__, "beat": _no_beat}


def mini_batches(rows: Sequence[Row], count: int) -> list[Ints]:
    """The indices of the rows of each mini-batch: consecutive groups, about as many in each. A step with
    fewer groups than mini-batches is split by rollouts, and one with fewer rollouts makes fewer
    mini-batches. All rows of a rollout are in one."""
    names: dict[str, int] = {}
    owners: list[str] = []
    for owners in ([row.group_id for row in rows], [row.session_id for row in rows]):
        names = {name: at for at, name in enumerate(dict.fromkeys(owners))}
        if len(names) >= count:
            break
    count = min(count, len(names))
    home_R = np.array([names[owner] * count // len(names) for owner in owners])
    return [np.flatnonzero(home_R == number) for number in range(count)]


def packed_rows(
    rows: Sequence[Row], at: Ints, max_tokens: int, share_prefixes: bool = False
) -> list[MicroBatch]:
    """The micro-batches of the rows at the indices `at`. Their rows are numbered over all `rows`."""
    packed = micro_batches([rows[index] for index in at], max_tokens, share_prefixes)
    return [replace(batch, rows_T=at[batch.rows_T]) for batch in packed]


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


def step_parts(policy: TrainablePolicy, request: StepRequest, rows_before: int = 0) -> list[StepPart]:
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
