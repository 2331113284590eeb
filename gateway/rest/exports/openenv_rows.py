"""Rows with OpenEnv's training trace, one for each session, with the names of OpenEnv 0.10.0."""

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.rest.exports.pending_rows import PendingRow, RowOrigin, origin_of
from gateway.rest.exports.samples import zeros
from gateway.rest.exports.selection import TrainedSession
from rollout_queue.contract.records import Finish, Relation, Span, Turn
from rollout_queue.contract.rewards import total
from rollout_queue.contract.rows import row_to_json
from rollout_queue.contract.tokens import Logprobs, TokenIds


class OpenEnvMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a call beside its tokens. Weir records no messages."""

    parent_id: str | None
    relation: Relation
    model: str
    finish_reason: Finish
    sampling_params: dict[str, Any]
    requested_sampling_params: dict[str, Any]
    versions: tuple[Span, ...]
    reward: float | None
    """The sum of the turn's own rewards; the session's reward includes it."""


class OpenEnvTurn(msgspec.Struct, frozen=True, kw_only=True):
    """OpenEnv's `TrainingTurn`: one call with its whole prompt. The mask covers prompt and completion."""

    node_id: str
    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    per_token_logps: Logprobs
    loss_mask: TokenIds
    metadata: OpenEnvMetadata


def openenv_rows(session: TrainedSession) -> Iterator[PendingRow]:
    origin = origin_of(session, "")
    yield PendingRow(origin.cursor, origin.created_at, lambda: _pieces(session, origin))


def _pieces(session: TrainedSession, origin: RowOrigin) -> Iterator[bytes]:
    """The line in pieces of one call: the prompts of a session grow with the square of its length."""
    yield row_to_json(origin)[:-1] + b',"trace":{"schema_version":1,"turns":['
    comma, trained = b"", session.trained
    for turn in _turns(session):
        yield comma + row_to_json(_turn(session, turn, turn.turn_id in trained))
        comma = b","
    yield b"]}}\n"


def _turns(session: TrainedSession) -> Iterator[Turn]:
    """Each turn of the branches once, branch after branch. Readers compare a turn with the one before it."""
    turns = {turn.turn_id: turn for branch in session.branches for turn in branch.turns}
    return (turn for turn in turns.values() if turn.output_ids)


def _turn(session: TrainedSession, turn: Turn, trained: bool) -> OpenEnvTurn:
    prompt, output = session.head.branch_ids(turn)
    mask = zeros(len(prompt))
    mask += TokenIds([int(trained)] * len(output))
    return OpenEnvTurn(
        node_id=turn.turn_id,
        prompt_token_ids=prompt,
        completion_token_ids=output,
        per_token_logps=turn.logprobs,
        loss_mask=mask,
        metadata=OpenEnvMetadata(
            parent_id=turn.parent_id,
            relation=session.head.relation_of(turn),
            model=turn.policy,
            finish_reason=turn.finish,
            sampling_params=turn.sampling.used,
            requested_sampling_params=turn.sampling.asked,
            versions=turn.versions,
            reward=total(session.head.rewards_of(turn)),
        ),
    )
