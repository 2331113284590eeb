"""Finds the turn of a session that a call continues, and the tokens that the call adds to it.

messages ──digests──▶ the turn whose conversation they begin with ──bridge──▶ its tokens and the new ones
                      no such turn, or the template cannot bridge ──render──▶ the deepest turn with whose
                                                                              tokens the prompt begins
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from gateway.conversations.branches import Reason, deepest_match, live_turns, why_forked
from gateway.conversations.digests import chain
from gateway.language.chat_messages import Message, Tool
from gateway.language.render import ChatRenderer, ParsedAnswer
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Relation, Turn
from rollout_queue.contract.tokens import TokenIds

CACHED_PROMPTS, MAX_CACHED_BYTES = 256, 32 * 2**10
"""How many first prompts of conversations are cached, and how long their JSON may be."""


class Prompt(msgspec.Struct, frozen=True):
    """The position of a call in its session's tree, and the ids that it adds there."""

    parent: Turn | None
    relation: Relation
    reason: str | None
    """One of `branches.Reason`; None if the call is the first of its session, or extends its parent."""
    context_ids: TokenIds
    """The ids after the parent's last token; the whole prompt if there is no parent."""
    prompt_ids: TokenIds
    """The whole prompt, as the engine receives it."""
    digest: bytes


def reply_message(answer: ParsedAnswer) -> Message:
    """The answer as the message that the client sends back in its next call."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in answer.tool_calls]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


def locate(
    renderer: ChatRenderer,
    head: SessionHead,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
) -> Prompt:
    """Find the parent of a call and the ids that it adds: by bridging from the parent, else by rendering."""
    turns = live_turns(head) if head.turns else []
    if not turns:
        encoded = msgspec.json.encode((messages, tools))
        if len(encoded) > MAX_CACHED_BYTES:
            return _root(renderer, messages, tools)
        return _first_prompt(renderer, encoded, renderer.today())
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
            relation, reason = _relation_to(continued, turns, digests[-1])
            return Prompt(continued, relation, reason, added, prompt_ids, digests[-1])
    prompt_ids = renderer.render(messages, tools)
    parent, known = deepest_match(turns, prompt_ids)
    if continued is None or parent is continued:
        relation, reason = _relation(parent, turns, messages, digests, len(prompt_ids))
    elif any(message["role"] == "assistant" for message in messages[end:]):
        relation, reason = "forks", "history_edited"
    else:
        relation, reason = "rerendered", "template_rewrites_history"
    return Prompt(parent, relation, reason, TokenIds(prompt_ids[known:]), prompt_ids, digests[-1])


def clear_prompt_cache() -> None:
    """Forget the first prompts of conversations: their texts may have been deleted since."""
    _first_prompt.cache_clear()


@lru_cache(CACHED_PROMPTS)
def _first_prompt(renderer: ChatRenderer, encoded: bytes, today: str) -> Prompt:
    """The prompt of a first call, in JSON; cached, because all episodes of a group begin with the same."""
    return _root(renderer, *msgspec.json.decode(encoded))


def _root(renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Prompt:
    prompt_ids = renderer.render(messages, tools)
    return Prompt(None, "root", None, prompt_ids, prompt_ids, chain(tools, messages)[-1])


def _continued(
    turns: Sequence[Turn], messages: Sequence[Message], digests: Sequence[bytes]
) -> tuple[Turn | None, int]:
    """The latest turn with whose messages and answer the call begins, and how many messages that is."""
    by_reply: dict[str, list[Turn]] = {}
    for turn in turns:
        by_reply.setdefault(turn.reply_digest, []).append(turn)
    for end in range(len(messages) - 1, 0, -1):
        answer = messages[end - 1]
        if answer["role"] == "assistant" and (same := by_reply.get(digests[end].hex())):
            return _named_by(same, answer), end
    return None, 0


def _named_by(same: Sequence[Turn], answer: Message) -> Turn:
    """Of turns with the same text, the one whose tool call ids the client sends back; else the latest."""
    ids = "".join(str(call.get("id")) for call in answer.get("tool_calls") or ()) if len(same) > 1 else ""
    return next((turn for turn in same if turn.turn_id in ids), same[-1])


def _relation(
    parent: Turn | None,
    turns: Sequence[Turn],
    messages: Sequence[Message],
    digests: Sequence[bytes],
    length: int,
) -> tuple[Relation, Reason | None]:
    """The relation of a prompt to the turn with whose tokens it begins, or to the session without one."""
    if parent is not None:
        return _relation_to(parent, turns, digests[-1])
    return "forks", why_forked(turns, messages, digests, length)


def _relation_to(parent: Turn, turns: Sequence[Turn], digest: bytes) -> tuple[Relation, Reason | None]:
    """The first child of a turn extends it; any other child is a fork."""
    siblings = [turn.prompt_digest for turn in turns if turn.parent_id == parent.turn_id]
    if not siblings:
        return "extends", None
    return "forks", "sampled_again" if digest.hex() in siblings else "history_edited"
