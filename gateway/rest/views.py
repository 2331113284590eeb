"""Converts sessions to the objects that the REST routes reply with."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.callers.identity import Caller
from gateway.language.render import ChatRenderer
from gateway.operators.token_texts import texts_in
from gateway.operators.training import TrainingShape, training_of
from gateway.rest.shapes import (
    DeletedSessionRow,
    RewardShape,
    SessionFacts,
    SessionRow,
    SessionShape,
)
from gateway.rest.turns.drift import drift_of, merge_ratio_of
from gateway.rest.turns.messages import conversation_of, message_of
from gateway.rest.turns.shapes import TurnExtras, TurnShape, VersionRange
from gateway.rest.turns.shown import WHOLE, WITHOUT_TOKENS, Shown, TokenWindow
from gateway.sessions.verdicts import turn_verdict, untrained_spans, why_session, why_turn
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Reward, Turn, Verdict
from rollout_queue.contract.rewards import total
from rollout_queue.contract.tombstone import Tombstone
from rollout_queue.contract.verdicts import DELETED


def session_row(head: SessionHead, caller: Caller, verdict: Verdict, model_name: str) -> SessionRow:
    """A session in a list: sums over its turns in place of the turns."""
    sums = head.sums
    versions: VersionRange | None = None
    if sums.first_version is not None and sums.last_version is not None:
        versions = {"first": sums.first_version, "last": sums.last_version}
    return {
        **_session(head, caller, verdict, model_name),
        "turn_count": sums.turns,
        "output_len": sums.output_len,
        "versions": versions,
    }


def deleted_row(tombstone: Tombstone, caller: Caller) -> DeletedSessionRow:
    """A deleted session in a list."""
    return {
        "session_id": caller.shown_id(tombstone),
        "created_at": tombstone.created_at,
        "deleted_at": tombstone.deleted_at,
        "verdict": msgspec.to_builtins(DELETED),
    }


def session_view(
    head: SessionHead,
    caller: Caller,
    verdict: Verdict,
    model_name: str,
    renderer: ChatRenderer,
    shown: Shown = WITHOUT_TOKENS,
    group_rewards: Sequence[float] = (),
) -> SessionShape:
    """The whole session, with what `shown` has of its turns. `group_rewards` are those of its group, if they
    tell why the session has no advantage. Raises as `Shown.turns`."""
    why = why_session(head, verdict, group_rewards)
    return {
        **_session(head, caller, verdict, model_name),
        "why": why,
        "merge_ratio": merge_ratio_of(head),
        "drift": drift_of(head),
        "turns": [_turn(head, turn, verdict, renderer, shown, why) for turn in shown.turns(head)],
    }


def _session(head: SessionHead, caller: Caller, verdict: Verdict, model_name: str) -> SessionFacts:
    spec = head.spec
    return {
        "session_id": caller.shown_id(spec),
        "state": head.state,
        "status": head.outcome.status if head.outcome else None,
        "inferred": spec.inferred,
        "group_id": caller.shown_group(spec),
        "group_size": spec.group_size,
        "task_id": spec.task_id,
        "policy": spec.policy or model_name,
        "user": spec.user,
        "metadata": spec.metadata,
        "reasoning_effort": spec.reasoning_effort,
        "thinking": spec.thinking,
        "reward": head.reward,
        "rewards": [reward_view(reward) for reward in head.rewards],
        "created_at": spec.created_at,
        "expires_at": head.expires_at,
        "verdict": msgspec.to_builtins(verdict),
    }


def _turn(
    head: SessionHead,
    turn: Turn,
    session: Verdict,
    renderer: ChatRenderer,
    shown: Shown,
    session_why: str | None,
) -> TurnShape:
    verdict = turn_verdict(head, turn, session)
    why = why_turn(head, turn, verdict, session_why)
    view: TurnShape = {
        "turn_id": turn.turn_id,
        "parent_id": turn.parent_id,
        "completion_id": turn.completion_id,
        "relation": head.relation_of(turn),
        "reason": turn.reason,
        "side_call": turn.side_call,
        "ignored_fields": list(turn.ignored_fields),
        "context_len": len(turn.context_ids),
        "output_len": len(turn.output_ids),
        "finish_reason": turn.finish,
        "created_at": turn.started_at,
        "engine": turn.engine,
        "lineage": turn.lineage,
        "versions": msgspec.to_builtins(turn.versions),
        "sampling": msgspec.to_builtins(turn.sampling),
        "reward": total(head.rewards_of(turn)),
        "verdict": {"code": verdict.code, "detail": verdict.detail},
        "why": why,
        "images": msgspec.to_builtins(turn.images),
    }
    if shown.tokens:
        extras: Any = _tokens(head, turn, shown.window, why)
        view |= extras
    if shown.window != WHOLE:
        start, end = shown.window.of(turn)
        view["window"] = {"start": start, "end": end}
    if shown.token_texts:
        view["context_token_texts"] = texts_in(renderer, turn.context_ids, shown.window.context(turn))
        view["output_token_texts"] = texts_in(renderer, turn.output_ids, shown.window.output(turn))
    if shown.text:
        view["context_text"] = renderer.text_of(turn.context_ids)
        view["output_text"] = renderer.text_of(turn.output_ids)
        view["message"] = message_of(turn, renderer)
    if shown.messages:
        found = conversation_of(turn, renderer, shown.text_limit)
        view["messages"], view["messages_left_out"] = found
    return view


def _tokens(head: SessionHead, turn: Turn, window: TokenWindow, why: str | None) -> TurnExtras:
    """The tokens in the window with their numbers, and why those of the turn changed no weight."""
    output = window.output(turn)
    training = training_of(head, turn.turn_id, len(turn.output_ids))
    spans = untrained_spans(turn, why, None if training is None else training["advantages"])
    return {
        "context_ids": turn.context_ids[window.context(turn)].tolist(),
        "output_ids": turn.output_ids[output].tolist(),
        "logprobs": turn.logprobs.tolist()[output],
        "training": None if training is None else _part(training, output),
        "untrained": [{"start": span.start, "end": span.end, "why": span.why} for span in spans],
    }


def _part(training: TrainingShape, output: slice) -> TrainingShape:
    """The numbers of a part of the output tokens."""
    advantages, ratios = training["advantages"], training["ratios"]
    return {
        **training,
        "advantages": None if advantages is None else advantages[output],
        "ratios": None if ratios is None else ratios[output],
    }


def reward_view(reward: Reward) -> RewardShape:
    return {
        "value": reward.value,
        "turn_id": reward.turn_id,
        "key": reward.key,
        "source": reward.source,
        "created_at": reward.created_at,
        "late": reward.late,
    }
