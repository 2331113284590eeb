"""Which turn of a session a call continues, and the tokens that it adds there.

messages ──digests──▶ the turn whose conversation they begin with ──bridge──▶ its tokens, and the new ones
                      no such turn, or a template that refuses    ──render──▶ the deepest turn whose tokens
                                                                              the prompt begins with
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from gateway.conversations.branches import Reason, deepest, live_turns, why_forked
from gateway.conversations.digests import chain, continuation_digests, extend
from gateway.language.render import ChatRenderer, Message, ParsedAnswer, Tool
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Relation, Turn
from rollout_queue.contract.tokens import TokenIds

__all__ = ["Prompt", "chain", "continuation_digests", "extend", "place", "reply_message"]

OPENINGS, LONGEST_OPENING = 256, 32 * 2**10
"""How many beginnings are remembered, and of how many bytes at most."""


class Prompt(msgspec.Struct, frozen=True):
    """Where a call stands in its session's tree, and the ids that it adds there."""

    parent: Turn | None
    relation: Relation
    reason: str | None
    """One of `branches.Reason`; None where the call begins a session or goes on with it."""
    context_ids: TokenIds
    """What is new since the parent's end; the whole prompt for a turn without parent."""
    prompt_ids: TokenIds
    """Everything that the engine is given."""
    digest: bytes


def reply_message(answer: ParsedAnswer) -> Message:
    """The answer as the message that the client will send back."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in answer.tool_calls]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


def place(
    renderer: ChatRenderer,
    head: SessionHead,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
) -> Prompt:
    """Find the parent of a call and the ids that it adds: by the bridge, else by a full render."""
    turns = live_turns(head) if head.turns else []
    if not turns:
        said = msgspec.json.encode((messages, tools))
        if len(said) > LONGEST_OPENING:
            return _root(renderer, messages, tools)
        return _opening(renderer, said, renderer.today())
    digests = chain(tools, messages)
    continued, end = _continued(turns, messages, digests)
    if continued is not None:
        added = renderer.bridge(
            continued.context_ids, continued.output_ids, messages[end:], tools, messages[:end]
        )
        if added is not None:
            prompt_ids, output_ids = head.branch_ids(continued)
            prompt_ids += output_ids
            prompt_ids += added
            relation, reason = _beside(continued, turns, digests[-1])
            return Prompt(continued, relation, reason, added, prompt_ids, digests[-1])
    prompt_ids = renderer.render(messages, tools)
    parent, known = deepest(turns, prompt_ids)
    if continued is None or parent is continued:
        relation, reason = _relation(parent, turns, messages, digests, len(prompt_ids))
    elif any(message["role"] == "assistant" for message in messages[end:]):
        relation, reason = "forks", "history_edited"
    else:
        relation, reason = "rerendered", "template_rewrites_history"
    return Prompt(parent, relation, reason, TokenIds(prompt_ids[known:]), prompt_ids, digests[-1])


def forget_openings() -> None:
    """Remember no conversation any more."""
    _opening.cache_clear()


@lru_cache(OPENINGS)
def _opening(renderer: ChatRenderer, said: bytes, today: str) -> Prompt:
    """A conversation that begins, given as JSON: the episodes of a group all begin with the same one."""
    return _root(renderer, *msgspec.json.decode(said))


def _root(renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Prompt:
    prompt_ids = renderer.render(messages, tools)
    return Prompt(None, "root", None, prompt_ids, prompt_ids, chain(tools, messages)[-1])


def _continued(
    turns: Sequence[Turn], messages: Sequence[Message], digests: Sequence[bytes]
) -> tuple[Turn | None, int]:
    """The latest turn that the messages begin with, answer included, and how many messages that is."""
    by_reply: dict[str, list[Turn]] = {}
    for turn in turns:
        by_reply.setdefault(turn.reply_digest, []).append(turn)
    for end in range(len(messages) - 1, 0, -1):
        answer = messages[end - 1]
        if answer["role"] == "assistant" and (same := by_reply.get(digests[end].hex())):
            return _meant(same, answer), end
    return None, 0


def _meant(same: Sequence[Turn], answer: Message) -> Turn:
    """Of turns that read the same, the one whose calls the client names; else the latest."""
    ids = "".join(str(call.get("id")) for call in answer.get("tool_calls") or ()) if len(same) > 1 else ""
    return next((turn for turn in same if turn.turn_id in ids), same[-1])


def _relation(
    parent: Turn | None,
    turns: Sequence[Turn],
    messages: Sequence[Message],
    digests: Sequence[bytes],
    length: int,
) -> tuple[Relation, Reason | None]:
    """How a prompt stands to the turn whose tokens it begins with, or to all of them."""
    if parent is not None:
        return _beside(parent, turns, digests[-1])
    return "forks", why_forked(turns, messages, digests, length)


def _beside(parent: Turn, turns: Sequence[Turn], digest: bytes) -> tuple[Relation, Reason | None]:
    """The first to go on from a turn extends it; another is a fork."""
    others = [turn.prompt_digest for turn in turns if turn.parent_id == parent.turn_id]
    if not others:
        return "extends", None
    return "forks", "sampled_again" if digest.hex() in others else "history_edited"
