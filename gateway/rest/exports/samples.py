"""One trained branch as a prompt and a response, with a mask, logprobs and policy versions for each token.

root ─ a ─ b      prompt:    the context of root
     └ c          response:  output of root, context of b, output of b, …; mask 1 where a token is trained
"""

from typing import NamedTuple

import msgspec

from rollout_queue.contract.head import SessionHead, TrainedBranch
from rollout_queue.contract.records import Turn
from rollout_queue.contract.rewards import total
from rollout_queue.contract.sampling import temperature_of_logprobs
from rollout_queue.contract.tokens import Logprobs, TokenIds

NO_VERSION = -1


class SampleTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The response tokens [start, end) are the output of this turn."""

    turn_id: str
    start: int
    end: int
    trained: bool
    """False for a turn that another row trains, or that must not be trained. Its mask is 0."""
    reward: float | None
    """The sum of the turn's own rewards; the session's reward includes it."""
    temperature: float
    """The logprobs are those of the distribution at this temperature."""
    finish_reason: str


class Sample(NamedTuple):
    """P prompt tokens and R response tokens. The last response token is trained."""

    prompt_P: TokenIds
    response_R: TokenIds
    mask_R: TokenIds
    """1 for tokens that the policy sampled and that this row trains, 0 for others."""
    logprobs_R: Logprobs
    """In nats, as the engine reported them; 0 where the mask is 0."""
    versions_R: TokenIds
    """The policy version that sampled each token; -1 where the mask is 0."""
    turns: tuple[SampleTurn, ...]
    seconds: float
    """The sum of the times that the calls took."""

    @property
    def versions(self) -> tuple[int, int]:
        """The smallest and the largest version of the trained tokens."""
        known = [version for version in self.versions_R if version != NO_VERSION]
        return min(known), max(known)


def sample_of(head: SessionHead, branch: TrainedBranch) -> Sample:
    """The tokens of a branch up to the last one that is trained."""
    last = max(number for number, turn in enumerate(branch.turns) if turn.turn_id in branch.trained)
    turns = branch.turns[: last + 1]
    response, mask, versions = TokenIds(), TokenIds(), TokenIds()
    logprobs = Logprobs()
    spans = []
    for number, turn in enumerate(turns):
        if number:  # the context of the first turn is the prompt
            between = len(turn.context_ids)
            response += turn.context_ids
            mask += zeros(between)
            versions += TokenIds([NO_VERSION] * between)
            logprobs += Logprobs([0.0] * between)
        start, length, trained = len(response), len(turn.output_ids), turn.turn_id in branch.trained
        response += turn.output_ids
        mask += TokenIds([int(trained)] * length)
        versions += versions_of(turn) if trained else TokenIds([NO_VERSION] * length)
        logprobs += turn.logprobs if trained else Logprobs([0.0] * length)
        spans.append(_span(head, turn, start, trained))
    seconds = sum(turn.finished_at - turn.started_at for turn in turns)
    return Sample(turns[0].context_ids, response, mask, logprobs, versions, tuple(spans), seconds)


def zeros(count: int) -> TokenIds:
    return TokenIds.unpack(bytes(4 * count))


def versions_of(turn: Turn) -> TokenIds:
    """The policy version of each output token."""
    versions = TokenIds()
    for span in turn.versions:
        versions += TokenIds([span.version]) * (span.end - span.start)
    return versions


def _span(head: SessionHead, turn: Turn, start: int, trained: bool) -> SampleTurn:
    return SampleTurn(
        turn_id=turn.turn_id,
        start=start,
        end=start + len(turn.output_ids),
        trained=trained,
        reward=total(head.rewards_of(turn)),
        temperature=temperature_of_logprobs(turn.sampling.used),
        finish_reason=turn.finish,
    )
