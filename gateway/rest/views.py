"""Converts sessions to the objects that the REST routes reply with.

Which turns and tokens of a session a request asks for, within bounds.

The messages that a recorded turn's tokens mean, with the names of chat completions.

Drift: how many turns of a session do not extend their parent turn, so that training needs another row.

root ─ a ─ b      five turns, two leaves, so two training rows: merge_ratio 2 / 5 = 0.4
     └ c ─ d      (1.0: every turn has a row of its own, and the trainer computes shared tokens again)

extends      the turn's prompt begins with all tokens of its parent, which has no earlier child
forks        the turn is a later child of its parent, or continues no turn; its `reason` says why
rerendered   the agent only added messages, but the chat template changed the tokens of earlier ones
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.callers.identity import Caller
from gateway.errors import InvalidRequest, ObjectNotFound
from gateway.language.parsed_answer import ParsedAnswer
from gateway.language.render import ChatRenderer
from gateway.operators.lineage import TrainingShape, training_of
from gateway.operators.prompt_reader import PromptMessage, PromptReader, texts_in
from gateway.rest.shapes import (
    ConversationMessage,
    DeletedSessionRow,
    Drift,
    MessageShape,
    RewardShape,
    SessionFacts,
    SessionRow,
    SessionShape,
    ToolCallShape,
    TurnExtras,
    TurnShape,
    VersionRange,
)
from gateway.sessions.verdicts import turn_verdict, untrained_spans, why_session, why_turn
from rollout_queue.contract.head import SessionHead, Tombstone
from rollout_queue.contract.outcomes import DELETED, total
from rollout_queue.contract.records import Reward, Turn, Verdict

MOST_TURNS_NAMED = 100
MOST_TOKEN_TEXTS = 100_000
"""Tokens whose single texts one reply has at most."""
MOST_MESSAGE_TOKENS = 200_000
"""Tokens that are read back as messages for one reply, unless it has one turn only, or the ends."""
MOST_TEXT = 20_000
"""Characters of a message's text in a reply."""


class TokenWindow(NamedTuple):
    """The tokens [start, end) of a turn, counted from the first token of its context."""

    start: int = 0
    end: int | None = None

    def context(self, turn: Turn) -> slice:
        return slice(self.start, self._end(turn))

    def output(self, turn: Turn) -> slice:
        before = len(turn.context_ids)
        return slice(max(0, self.start - before), max(0, self._end(turn) - before))

    def of(self, turn: Turn) -> tuple[int, int]:
        """The window, cut to the turn's tokens."""
        end = self._end(turn)
        return min(self.start, end), end

    def _end(self, turn: Turn) -> int:
        length = len(turn.context_ids) + len(turn.output_ids)
        return length if self.end is None else min(self.end, length)


WHOLE = TokenWindow()


class Shown(NamedTuple):
    """What a reply has of a session's turns."""

    tokens: bool = False
    text: bool = False
    token_texts: bool = False
    turn_ids: Sequence[str] = ()
    """The turns that are shown; all if empty."""
    window: TokenWindow = WHOLE
    messages: bool = False
    ends: bool = False
    """Only the first turn and the last one, without the harness's own if there are others."""
    text_limit: int = MOST_TEXT
    """How many characters of a message's text are shown."""

    def check(self) -> None:
        """Raises InvalidRequest if the parameters do not fit together."""
        if len(self.turn_ids) > MOST_TURNS_NAMED:
            raise InvalidRequest(f"at most {MOST_TURNS_NAMED} turns can be named", param="turn_id")
        if self.window != WHOLE and len(self.turn_ids) != 1:
            raise InvalidRequest("a part of the tokens is read of one turn: name it", param="turn_id")
        start, end = self.window
        if end is not None and end < start:
            raise InvalidRequest("token_end is before token_start", param="token_end")

    def turns(self, head: SessionHead) -> list[Turn]:
        """The turns that are shown, in the session's order.

        Raises ObjectNotFound for a turn that the session does not have; InvalidRequest for the texts of too
        many tokens.
        """
        for turn_id in self.turn_ids:
            if turn_id not in head.by_id:
                raise ObjectNotFound(f"the session has no turn {turn_id[:200]!r}")
        turns = [turn for turn in head.turns if not self.turn_ids or turn.turn_id in self.turn_ids]
        if self.ends:
            own = [turn for turn in turns if turn.side_call is None] or turns
            turns = own if len(own) < 2 else [own[0], own[-1]]
        if self.messages and not self.ends and len(turns) > 1:
            _check_messages(turns)
        if self.token_texts:
            windows = [self.window.of(turn) for turn in turns]
            tokens = sum(end - start for start, end in windows)
            if tokens > MOST_TOKEN_TEXTS:
                raise InvalidRequest(
                    f"{tokens} tokens are more than the {MOST_TOKEN_TEXTS} whose texts one reply has: choose "
                    "turns by turn_id, or a part of one by token_start and token_end",
                    param="token_texts",
                )
        return turns


def _check_messages(turns: Sequence[Turn]) -> None:
    tokens = sum(len(turn.context_ids) + len(turn.output_ids) for turn in turns)
    if tokens > MOST_MESSAGE_TOKENS:
        raise InvalidRequest(
            f"{tokens} tokens are more than the {MOST_MESSAGE_TOKENS} that one reply shows as messages: "
            "choose turns by turn_id",
            param="messages",
        )


WITHOUT_TOKENS = Shown()


MOST_MESSAGES = 200
"""A turn shows so many messages of its context at most, the newest."""


def message_of(turn: Turn, renderer: ChatRenderer) -> MessageShape:
    """What the turn's tokens say."""
    answer = _answer(turn, renderer)
    return {
        "role": "assistant",
        "content": answer.content,
        "reasoning_content": answer.reasoning,
        "tool_calls": _calls(answer),
    }


def conversation_of(turn: Turn, renderer: ChatRenderer, limit: int) -> tuple[list[ConversationMessage], int]:
    """The messages that the turn adds to its parent's, its answer last, and how many older ones are left out.
    Each text has at most `limit` characters."""
    ids = turn.context_ids.tolist()
    found = PromptReader(renderer.tokenizer).read(ids)
    shown = [_of_prompt(each, turn, ids, renderer, limit) for each in found[-MOST_MESSAGES:]]
    # The prompt's end, which asks for the answer, is a message without content.
    said = [each for each in shown if each["content"] or each["tool_calls"] or each["reasoning_content"]]
    answer = _shape("assistant", _answer(turn, renderer), limit)
    return [*said, answer], max(0, len(found) - MOST_MESSAGES)


def _answer(turn: Turn, renderer: ChatRenderer) -> ParsedAnswer:
    """Its tools are not recorded, so every call of a tool counts as one."""
    return renderer.parse(turn.output_ids.tolist(), None, turn.turn_id, prompt_ids=turn.context_ids)


def _of_prompt(
    message: PromptMessage, turn: Turn, ids: Sequence[int], renderer: ChatRenderer, limit: int
) -> ConversationMessage:
    part = range(message.start, message.end)
    if message.role == "assistant":
        answer = renderer.parse(ids[message.start : message.end], None, f"{turn.turn_id}_{message.start}")
    else:
        answer = ParsedAnswer(message.text)
    images = [place for place, each in enumerate(turn.images) if each.start in part]
    return {**_shape(message.role, answer, limit), "images": images}


def _shape(role: str, answer: ParsedAnswer, limit: int) -> ConversationMessage:
    """The message, with each of its texts cut to the limit."""
    calls = _calls(answer)
    texts = [answer.content, answer.reasoning or "", *(call["function"]["arguments"] for call in calls)]
    for call in calls:
        call["function"]["arguments"] = call["function"]["arguments"][:limit]
    return {
        "role": role,  # type: ignore[typeddict-item]  # one of the roles of `PromptReader`
        "content": answer.content[:limit],
        "reasoning_content": answer.reasoning and answer.reasoning[:limit],
        "tool_calls": calls,
        "images": [],
        "left_out": sum(max(0, len(text) - limit) for text in texts),
    }


def _calls(answer: ParsedAnswer) -> list[ToolCallShape]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]


def merge_ratio_of(head: SessionHead) -> float | None:
    """Rows per turn; None if no turn makes a row."""
    turns = _trainable(head)
    continued = {turn.parent_id for turn in turns}
    rows = sum(turn.turn_id not in continued for turn in turns)
    return rows / len(turns) if turns else None


def drift_of(head: SessionHead) -> Drift:
    """The number of turns by relation, and of forks by reason."""
    turns = _trainable(head)
    relations = Counter(head.relation_of(turn) for turn in turns)
    forks = Counter(turn.reason or "" for turn in turns if head.relation_of(turn) == "forks")
    return {
        "extends": relations["extends"],
        "rerendered": relations["rerendered"],
        "forks": dict(sorted(forks.items())),
    }


def _trainable(head: SessionHead) -> list[Turn]:
    """The turns that make rows: all but aborted turns and turns that a retry replaced."""
    return [turn for turn in head.turns if turn.finish != "abort" and turn.turn_id not in head.orphans]


def session_row(head: SessionHead, caller: Caller, verdict: Verdict, model_name: str) -> SessionRow:
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
