"""What the trainer has stored of a trained turn, as the REST routes show it."""

import logging

from typing_extensions import TypedDict

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.turn_parts.trained_tokens import TrainedTokens

logger = logging.getLogger(__name__)


class TrainingShape(TypedDict):
    """The step that trained a turn, the version that it made, and one number for each output token. A ratio
    is null if the trainer's log-probability was not finite. A list is null if it was not recorded."""

    step: int
    version: int
    advantages: list[float] | None
    ratios: list[float | None] | None


def trained_tokens(head: SessionHead, turn_id: str) -> TrainedTokens | None:
    """What is stored of the tokens of a trained turn; None if nothing is, or if this build cannot read it."""
    packed = head.trained_tokens.get(turn_id)
    if packed is None:
        return None
    try:
        return TrainedTokens.unpack(packed)
    except (InvalidRecord, UnknownSchema) as error:
        logger.error("what a step used of turn %s cannot be read: %s", turn_id, error)
        return None


def training_of(head: SessionHead, turn_id: str, tokens: int) -> TrainingShape | None:
    """Of a turn with so many output tokens; None if no durable step has trained it."""
    verdict = head.turn_verdicts.get(turn_id)
    if verdict is None or verdict.code != "trained" or verdict.step is None or verdict.version is None:
        return None
    found = trained_tokens(head, turn_id)
    if found is None or found.tokens != tokens:
        found = TrainedTokens(tokens)
    return {
        "step": verdict.step,
        "version": verdict.version,
        "advantages": found.advantage_list,
        "ratios": found.ratio_list,
    }
