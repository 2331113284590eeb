"""Converts sessions to the objects that the REST routes reply with."""

import msgspec

from gateway.language.render import ChatRenderer
from gateway.rest.drift import drift_of, merge_ratio_of
from gateway.rest.shapes import (
    DeletedSessionRow,
    RewardShape,
    SessionFacts,
    SessionRow,
    SessionShape,
    TurnShape,
)
from gateway.rest.turn_messages import message_of
from gateway.sessions.identity import Caller
from gateway.sessions.verdicts import turn_verdict
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Reward, Turn, Verdict
from rollout_queue.contract.rewards import total
from rollout_queue.contract.tombstone import Tombstone
from rollout_queue.contract.verdicts import DELETED


def session_row(head: SessionHead, caller: Caller, verdict: Verdict, model_name: str) -> SessionRow:
    """A session in a list: the number of its turns in place of the turns."""
    return {**_session(head, caller, verdict, model_name), "turn_count": len(head.turns)}


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
    tokens: bool,
    text: bool,
) -> SessionShape:
    """The whole session; `tokens` adds token ids and logprobs, `text` the decoded text."""
    return {
        **_session(head, caller, verdict, model_name),
        "merge_ratio": merge_ratio_of(head),
        "drift": drift_of(head),
        "turns": [_turn(head, turn, verdict, renderer, tokens, text) for turn in head.turns],
    }


def _session(head: SessionHead, caller: Caller, verdict: Verdict, model_name: str) -> SessionFacts:
    spec = head.spec
    return {
        "session_id": caller.shown_id(spec),
        "state": head.state,
        "status": head.outcome.status if head.outcome else None,
        "inferred": spec.inferred,
        "group_id": spec.group_id,
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
    head: SessionHead, turn: Turn, session: Verdict, renderer: ChatRenderer, tokens: bool, text: bool
) -> TurnShape:
    verdict = turn_verdict(head, turn, session)
    view: TurnShape = {
        "turn_id": turn.turn_id,
        "parent_id": turn.parent_id,
        "completion_id": turn.completion_id,
        "relation": head.relation_of(turn),
        "reason": turn.reason,
        "side_call": turn.side_call,
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
        "images": msgspec.to_builtins(turn.images),
    }
    if tokens:
        view["context_ids"] = turn.context_ids.tolist()
        view["output_ids"] = turn.output_ids.tolist()
        view["logprobs"] = turn.logprobs.tolist()
    if text:
        view["context_text"] = renderer.text_of(turn.context_ids)
        view["output_text"] = renderer.text_of(turn.output_ids)
        view["message"] = message_of(turn, renderer)
    return view


def reward_view(reward: Reward) -> RewardShape:
    return {
        "value": reward.value,
        "turn_id": reward.turn_id,
        "key": reward.key,
        "source": reward.source,
        "created_at": reward.created_at,
        "late": reward.late,
    }
