"""The steps and versions of the stream in memory, and what steps used of the tokens of turns."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Verdict


@dataclass(kw_only=True)
class MemorySteps:
    """The part of `MemoryStream` that has the durable steps and the reserved versions."""

    reserved: int = -1
    """The highest version that the trainer has reserved."""
    steps: dict[int, TrainedStep] = field(default_factory=dict)
    """By the version that each made."""

    def keep_steps(self, steps: Iterable[TrainedStep]) -> None:
        self.steps |= {step.version: step for step in steps}


def with_turn_verdict(head: SessionHead, turn_id: str, verdict: Verdict, tokens: bytes | None) -> SessionHead:
    """The head with a turn's verdict, and with what a step used of the turn's tokens, if it was trained."""
    trained = head.trained_tokens if tokens is None else {**head.trained_tokens, turn_id: tokens}
    verdicts = {**head.turn_verdicts, turn_id: verdict}
    return msgspec.structs.replace(head, turn_verdicts=verdicts, trained_tokens=trained)
