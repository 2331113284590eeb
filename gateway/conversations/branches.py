"""Finds the parent of a prompt in its session's tree, and the reason if the prompt extends no turn.

root ─ a ─ b        A prompt that begins with all tokens of root and a, but not with those of b, becomes a
     └ c            child of a. So the tokens that branches share are stored once.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from gateway.conversations.digests import NO_TOOLS, Digest
from gateway.language.chat_messages import Message
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn
from rollout_queue.contract.tokens import TokenIds
from rollout_queue.contract.turn_parts.images import TurnImage

Reason = Literal[
    "template_rewrites_history",
    "sampled_again",
    "history_edited",
    "tools_changed",
    "main_line",
    "sub_agent",
    "compaction",
    "new_conversation",
]
"""Why a turn does not extend its session's conversation.

template_rewrites_history  the call continues a turn, but the template renders earlier messages differently
sampled_again              the call equals an earlier one, as in best-of-n sampling
history_edited             the call begins like an earlier one, and then differs
tools_changed              the call begins like an earlier one, but has another list of tools
compaction                 the call has a shorter history in place of the session's
main_line                  the call begins like no earlier one, and is the first of its session with tools.
                           The calls before it were the harness's own, such as a request for a title
sub_agent                  the call begins like no earlier one, and has another system prompt or other tools
                           than the session's main line, which is the longest conversation with tools
new_conversation           the call begins like no earlier one, but has that system prompt and those tools
"""


def live_turns(head: SessionHead) -> list[Turn]:
    """The turns that a call can continue, the likeliest last.

    Aborted turns are left out: their answers never reached the agent. Turns that a retry replaced come first,
    because the agent received the answer of the retry.
    """
    live = [turn for turn in head.turns if turn.finish != "abort"]
    return sorted(live, key=lambda turn: turn.turn_id not in head.orphans) if head.orphans else live


def deepest_match(
    turns: Sequence[Turn], prompt_ids: TokenIds, images: Sequence[TurnImage] = ()
) -> tuple[Turn | None, int]:
    """Find the deepest turn whose prompt and output `prompt_ids` begins with, also in its `images`.

    Returns the turn and the length of its prompt and output in tokens; (None, 0) if there is no such turn.
    """
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
                and turn.images == images_within(images, start, middle)
            ):
                reached.append((turn, end))
    return best


def images_within(images: Sequence[TurnImage], start: int, end: int) -> tuple[TurnImage, ...]:
    """The images among the tokens [start, end) of a prompt, with places in this part of it."""
    return tuple(image.moved(-start) for image in images if start <= image.start < end)


def why_forked(
    turns: Sequence[Turn], messages: Sequence[Message], digests: Sequence[bytes], length: int
) -> Reason:
    """Why a call continues no turn; `length` is the number of tokens of its prompt."""
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
    if prefixes[-1].tools != NO_TOOLS and all(prompt.tools == NO_TOOLS for prompt in prompts):
        return "main_line"
    if _main_line(turns).instructions != prefixes[-1].instructions:
        return "sub_agent"
    has_history = any(message["role"] in ("assistant", "tool") for message in messages)
    return "compaction" if has_history and shorter else "new_conversation"


def _main_line(turns: Sequence[Turn]) -> Digest:
    """The prompt of the session's longest conversation; one with tools, if any has tools."""
    prompts = {turn.turn_id: Digest(bytes.fromhex(turn.prompt_digest)) for turn in turns}
    lengths = _lengths(turns)
    longest = max(prompts, key=lambda turn_id: (prompts[turn_id].tools != NO_TOOLS, lengths[turn_id]))
    return prompts[longest]


def _longest(turns: Sequence[Turn]) -> int:
    """Tokens of the longest conversation in the session."""
    return max(_lengths(turns).values())


def _lengths(turns: Sequence[Turn]) -> dict[str | None, int]:
    """By turn, the tokens of the conversation that ends with it."""
    ends: dict[str | None, int] = {None: 0}
    for turn in turns:
        ends[turn.turn_id] = ends.get(turn.parent_id, 0) + len(turn.context_ids) + len(turn.output_ids)
    return ends
