"""Finds the turn from which a prompt branches in a session's tree, and why, if it does not extend a turn.

root ─ a ─ b        a prompt that begins with all tokens of root and a, but not with those of b, becomes a
     └ c            child of a: the tokens that branches share are stored once
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from gateway.conversations.digests import Digest
from gateway.language.chat_messages import Message
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn
from rollout_queue.contract.tokens import TokenIds

Reason = Literal[
    "template_rewrites_history",
    "sampled_again",
    "history_edited",
    "tools_changed",
    "sub_agent",
    "compaction",
    "new_conversation",
]
"""Why a turn does not extend the turn before it.

template_rewrites_history  the call continues a turn, but the template renders earlier messages differently
sampled_again              the call is the same as an earlier one: best of n
history_edited             the call begins as an earlier one does, and then differs
tools_changed              the call continues a turn with another list of tools
sub_agent                  the system prompt or the tools differ from those of the session's first call
compaction                 the call replaces the session's history by something shorter
new_conversation           the system prompt and the tools are the same, and no message is
"""


def live_turns(head: SessionHead) -> list[Turn]:
    """The turns that a call can continue, the likeliest last.

    An aborted turn is none of them: it never reached its agent. A turn that a retry replaced comes early in
    the list, because the agent received the answer of the retry.
    """
    live = [turn for turn in head.turns if turn.finish != "abort"]
    return sorted(live, key=lambda turn: turn.turn_id not in head.orphans) if head.orphans else live


def deepest_match(turns: Sequence[Turn], prompt_ids: TokenIds) -> tuple[Turn | None, int]:
    """The deepest turn with whose tokens `prompt_ids` begins, and how many tokens that is; else (None, 0)."""
    children: dict[str | None, list[Turn]] = defaultdict(list)
    for turn in turns:
        children[turn.parent_id].append(turn)
    best: tuple[Turn | None, int] = (None, 0)
    reached = [best]
    while reached:
        parent, start = reached.pop()
        if start > best[1]:
            best = parent, start
        for turn in children[parent.turn_id if parent else None]:
            middle = start + len(turn.context_ids)
            end = middle + len(turn.output_ids)
            if (
                end < len(prompt_ids)
                and prompt_ids[start:middle] == turn.context_ids
                and prompt_ids[middle:end] == turn.output_ids
            ):
                reached.append((turn, end))
    return best


def why_forked(
    turns: Sequence[Turn], messages: Sequence[Message], digests: Sequence[bytes], length: int
) -> Reason:
    """The reason of a call that continues no turn; `length` is the number of tokens of its prompt."""
    prefixes = [Digest(digest) for digest in digests]
    prompts = [Digest(bytes.fromhex(turn.prompt_digest)) for turn in turns]
    if prefixes[-1] in prompts:
        return "sampled_again"
    known = {*prompts, *(Digest(bytes.fromhex(turn.reply_digest)) for turn in turns)}
    shorter = length < _longest(turns)
    known_messages = {digest.messages for digest in known}
    shared = max(
        (end for end in range(1, len(prefixes)) if prefixes[end].messages in known_messages), default=0
    )
    if shared:
        same = [digest for digest in known if digest.messages == prefixes[shared].messages]
        if prefixes[-1].tools not in {digest.tools for digest in same}:
            return "tools_changed"
        dropped = shared < len(messages) and messages[shared]["role"] not in ("assistant", "tool")
        return "compaction" if dropped and shorter else "history_edited"
    if prompts[0].instructions != prefixes[-1].instructions:
        return "sub_agent"
    has_history = any(message["role"] in ("assistant", "tool") for message in messages)
    return "compaction" if has_history and shorter else "new_conversation"


def _longest(turns: Sequence[Turn]) -> int:
    """Tokens of the longest conversation in the session."""
    ends: dict[str | None, int] = {None: 0}
    for turn in turns:
        ends[turn.turn_id] = ends.get(turn.parent_id, 0) + len(turn.context_ids) + len(turn.output_ids)
    return max(ends.values())
