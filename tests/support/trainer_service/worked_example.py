"""The worked example of docs/training.md: reads its tables, and computes its step with the trainer's code.

tables ─▶ records ─▶ Assembler ─▶ screen ─▶ scored ─▶ micro_batches ─▶ OptimizerSteps with a `Listed`
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from rollout_queue.contract.records import Outcome, Record, Reward, Span
from rollout_queue.contract.stream import Entry
from tests.support.trainer_service.harness import turn
from trainer_service.algorithms.imitation import top_k_kl
from trainer_service.algorithms.policy_loss import LossSettings, PolicyLoss, policy_loss, step_statistics
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.tokens import Tokens
from trainer_service.groups.acknowledgement import Acknowledgement, acknowledgement_of
from trainer_service.groups.assemble import Assembler, Rules
from trainer_service.groups.screening import ScreenedGroup, screen, with_advantages
from trainer_service.model.forward import TokenScores
from trainer_service.rows.rows import MicroBatch, Row, micro_batches
from trainer_service.step.optimizer_step import OptimizerSteps
from trainer_service.step.step_parts import StepRequest, counts_of

DOCUMENT = Path(__file__).parents[3] / "docs/training.md"
VOCABULARY = 32
VERSION = 7
"""The trainer's version before the step."""

Table = Sequence[Mapping[str, str]]


def table(of: str, document: str | None = None) -> Table:
    """The rows of the table whose first column is `of`, as dictionaries by column, without backquotes."""
    text = DOCUMENT.read_text(encoding="utf-8") if document is None else document
    found = re.search(rf"^\| {re.escape(of)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found is not None, f"docs/training.md has no table of {of}s"
    names = _cells(found[0].split("\n")[0])
    return [dict(zip(names, _cells(line), strict=True)) for line in found[1].splitlines()]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def numbers(cell: str) -> list[float]:
    """The numbers in a cell, separated by blanks; `-` stands for none."""
    return [] if cell == "-" else [float(each) for each in cell.split()]


def integers(cell: str) -> list[int]:
    return [int(each) for each in numbers(cell)]


@dataclass
class Listed:
    """A model with given log-probabilities: `said` before its first step, then `says`. Its weights are the
    log-probabilities themselves, so that `backward` leaves their gradient."""

    said: Mapping[int, Sequence[float]]
    """The log-probabilities of each row's trained tokens."""
    says: Mapping[int, Sequence[float]]
    steps: int = 0
    losses: list[list[float]] = field(default_factory=lambda: [[]])
    leaves: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)
    """The log-probabilities of the last epoch, which get the gradient, by micro-batch."""

    @property
    def shares_prefixes(self) -> bool:
        return False

    @property
    def learning_rate(self) -> float:
        return 0.0

    def own_micro_batches(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        return [(batch, True) for batch in batches]

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        leaf_T = torch.tensor(_of(batch, self.says if self.steps else self.said), requires_grad=True)
        self.leaves.append((batch, leaf_T))
        return leaf_T, torch.zeros_like(leaf_T)

    def scores(self, batch: MicroBatch) -> TokenScores:
        return TokenScores(*self.logprobs(batch))

    def reference(self, batch: MicroBatch) -> Tensor:
        raise NotImplementedError

    @property
    def critic(self) -> Any:
        raise NotImplementedError

    @property
    def routers(self) -> None:
        return None

    def discard_gradients(self) -> None:
        raise NotImplementedError

    @property
    def ranks(self) -> int:
        return 1

    def backward(self, loss: Tensor) -> None:
        self.losses[-1].append(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, scale: float = 1.0) -> float:
        assert scale == 1, "the example has one micro-batch"
        self.steps += 1
        gradient = torch.cat([_gradient(leaf_T) for _, leaf_T in self.leaves])
        self.losses.append([])
        if self.steps == 1:
            self.leaves = []
        return float(torch.linalg.vector_norm(gradient))

    def all_gather(self, values: list[Any]) -> list[Any]:
        return values

    def tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values))


def _gradient(leaf_T: Tensor) -> Tensor:
    return torch.zeros_like(leaf_T) if leaf_T.grad is None else leaf_T.grad


def _flat(by_row: Mapping[int, Sequence[float]]) -> Tensor:
    return torch.tensor([each for row in sorted(by_row) for each in by_row[row]], dtype=torch.float64)


def _of(batch: MicroBatch, logprobs: Mapping[int, Sequence[float]]) -> list[float]:
    rows = dict.fromkeys(batch.rows_T.tolist())
    return [each for row in rows for each in logprobs[row]]


@dataclass(frozen=True)
class Example:
    """All records in the tables, and the results that the trainer's code computes from them."""

    algorithm: AlgorithmSettings

    @classmethod
    def of_document(cls) -> "Example":
        found = re.search(r"```yaml\n(trainer:\n.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
        assert found is not None
        return cls(AlgorithmSettings(**yaml.safe_load(found[1])["trainer"]["algorithm"]))

    @cached_property
    def records(self) -> list[Record]:
        sampled: dict[str, list[float]] = {}
        for each in table("token"):
            sampled.setdefault(each["turn"], []).append(math.log(float(each["engine"])))
        made: list[Record] = []
        groups = {each["session"]: each["group"] for each in table("session")}
        sizes = {name: list(groups.values()).count(name) for name in groups.values()}
        for each in table("turn"):
            output = integers(each["samples"])
            versions = integers(each["by version"])
            made.append(
                turn(
                    each["session"],
                    each["turn"],
                    parent_id=None if each["continues"] == "-" else each["continues"],
                    group_id=groups[each["session"]],
                    context_ids=integers(each["reads"]),
                    output_ids=output,
                    logprobs=sampled.get(each["turn"], [-1.0] * len(output)),
                    versions=tuple(Span(one, at, at + 1) for at, one in enumerate(versions)),
                )
            )
        for each in table("session"):
            name = each["session"]
            for source in ("answer", "style"):
                value = float(each[source])
                made.append(Reward(session_id=name, value=value, key=source, source=source, created_at=102.0))
            size, group = sizes[groups[name]], groups[name]
            made.append(
                Outcome(
                    session_id=name, status="completed", group_id=group, group_size=size, created_at=103.0
                )
            )
        return made

    @cached_property
    def judged(self) -> dict[str, ScreenedGroup]:
        rules = Rules(VOCABULARY, self.algorithm.shaping.truncated != "mask", self.algorithm.group_wait_s)
        assembler = Assembler(rules)
        assembler.add(Entry(f"{at}-0", record) for at, record in enumerate(self.records))
        groups = assembler.complete(caught_up=True)
        return {group.group_id: screen(group, VERSION, self.algorithm) for group in groups}

    @property
    def settled(self) -> Acknowledgement:
        live = {False: (1, VERSION + 1), True: (None, None)}
        return Acknowledgement.joined(
            acknowledgement_of(each, *live[bool(each.skip_reason)]) for each in self.judged.values()
        )

    @cached_property
    def rows(self) -> list[Row]:
        return self.scored(self.algorithm)

    def scored(self, algorithm: AlgorithmSettings) -> list[Row]:
        """The rows of the live group, with the advantages under other settings."""
        live = [each for each in self.judged.values() if not each.skip_reason]
        rows = [row for each in live for row in each.rows]
        return with_advantages(rows, [rollout for each in live for rollout in each.rollouts], algorithm, {})

    def listed(self, column: str) -> dict[int, list[float]]:
        by_row: dict[int, list[float]] = {}
        for each in table("token"):
            by_row.setdefault(int(each["row"]), []).append(math.log(float(each[column])))
        return by_row

    def step(self) -> tuple[dict[str, float], Listed]:
        """The whole step, both epochs, as `OptimizerSteps` runs it."""
        model = Listed(self.listed("begin"), self.listed("now"))
        return OptimizerSteps(model).step(StepRequest(self.rows, VERSION, self.algorithm)), model

    def batches(self) -> list[MicroBatch]:
        return list(micro_batches(self.rows, self.algorithm.micro_batch_tokens))

    def tokens(self) -> Tokens:
        """Every trained token of the step in its second epoch, in the order of the table. The reference and
        the teacher give each token 0.5, and it is the teacher's only top token."""
        half_T = torch.full(
            (sum(row.trained_tokens for row in self.rows),), math.log(0.5), dtype=torch.float64
        )
        lengths_R = torch.tensor([row.trained_tokens for row in self.rows])
        advantages_R = torch.tensor([row.advantage for row in self.rows], dtype=torch.float64)
        sampled = np.concatenate([row.logprobs_L[row.mask_L == 1] for row in self.rows])
        lp_new_T = _flat(self.listed("now")).requires_grad_()
        return Tokens(
            lp_new_T=lp_new_T,
            lp_prox_T=_flat(self.listed("begin")),
            lp_roll_T=torch.tensor(sampled, dtype=torch.float64),
            advantages_T=advantages_R.repeat_interleave(lengths_R),
            rows_T=torch.arange(len(self.rows)).repeat_interleave(lengths_R),
            lp_ref_T=half_T,
            lp_teacher_T=half_T,
            teacher_kl_T=top_k_kl(lp_new_T[:, None], half_T[:, None]),
        )

    def loss(self, settings: LossSettings) -> tuple[PolicyLoss, Tensor]:
        """The loss of the same tokens under other settings, and the gradient of each token."""
        tokens = self.tokens()
        statistics = step_statistics(tokens, settings) if settings.whole_step else None
        found = policy_loss(tokens, settings, counts_of(self.rows), statistics)
        (gradient_T,) = torch.autograd.grad(found.loss, tokens.lp_new_T, allow_unused=True)
        return found, torch.zeros_like(tokens.lp_new_T) if gradient_T is None else gradient_T
