"""The metrics of a step cost little: ranks exchange sums, and many rows cost what one long row costs."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.trainer_service.harness import Harness
from trainer_service.algorithms.aggregation import StepCounts
from trainer_service.algorithms.policy_loss import policy_loss
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.sums import Sums
from trainer_service.algorithms.tokens import Tokens
from trainer_service.step.diagnostics import SampledTokens, token_sums


class CountedValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the values that torch's operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        every = found if isinstance(found, (tuple, list)) else [found]
        self.values += sum(each.numel() for each in every if isinstance(each, Tensor))
        return found


def test_what_ranks_exchange_does_not_grow_with_the_tokens(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanged: list[int] = []

    def gather(values: list[Any]) -> list[Any]:
        if any(isinstance(each, Sums) for each in values):  # records of turns have a number for each token
            exchanged.append(len(pickle.dumps(values)))
        return values

    monkeypatch.setattr(harness.policy, "all_gather", gather)
    for name, tokens in (("short", 10), ("long", 400)):
        for reward in (1.0, 0.0):
            answer = {"output_ids": [10] * tokens, "logprobs": [-1.0] * tokens}
            harness.agents.episode(f"{name}-{reward}", reward, group_id=name, size=2, **answer)
        assert harness.trainer.run_once()
    short, long = exchanged
    assert long == pytest.approx(short, rel=0.1)  # some numbers take fewer bytes than others


def test_many_rows_cost_no_more_than_one_with_the_same_tokens() -> None:
    tokens = 2**14

    def values_of(rows: int) -> int:
        rows_T = torch.arange(rows).repeat_interleave(tokens // rows)
        lp_T = torch.full((tokens,), -1.0)
        some = Tokens(lp_T, lp_T, lp_T, torch.zeros(tokens), rows_T)
        counts = StepCounts(torch.full((rows,), tokens // rows), torch.arange(rows), torch.zeros(rows).long())
        losses = policy_loss(some, AlgorithmSettings(), counts)
        with CountedValues() as counted:
            token_sums(some, SampledTokens(lp_T, lp_T, torch.zeros(tokens).long()), losses, version=1)
        return int(counted.values)

    assert values_of(1024) < 1.5 * values_of(1)
