"""Where a prompt hangs in a session's tree, and why it does not go on from where the session was.

root ─ a ─ b        a prompt that begins with every token of root and a, and not of b, hangs off a:
     └ c            what the branches share is held once
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
"""Why a turn does not extend the one it follows.

template_rewrites_history  the call continues a turn, but the chat template renders what was before anew
sampled_again              the same call as an earlier one: best of n
history_edited             begins as an earlier call did, and then says otherwise
tools_changed              continues a turn with another list of tools
sub_agent                  another system prompt or other tools than the session began with
compaction                 the session's history gave way to something shorter
new_conversation           the same system prompt and tools, and nothing of what was said
"""


def live_turns(head: SessionHead) -> list[Turn]:
    """The turns that a call can continue, the likeliest last.

    An aborted one never reached its agent; of one that a retry replaced, the agent knows the retry.
    """
    live = [turn for turn in head.turns if turn.finish != "abort"]
    return sorted(live, key=lambda turn: turn.turn_id not in head.orphans) if head.orphans else live


def deepest(turns: Sequence[Turn], prompt_ids: TokenIds) -> tuple[Turn | None, int]:
    """The turn on whose last token `prompt_ids` goes on, and how many lie before; (None, 0) for none."""
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
    """Compare a call that continues none of the turns with all of them; `length` is of its prompt."""
    called = [Digest(digest) for digest in digests]
    asked = [Digest(bytes.fromhex(turn.prompt_digest)) for turn in turns]
    if called[-1] in asked:
        return "sampled_again"
    known = {*asked, *(Digest(bytes.fromhex(turn.reply_digest)) for turn in turns)}
    shorter = length < _longest(turns)
    talks = {digest.talk for digest in known}
    shared = max((end for end in range(1, len(called)) if called[end].talk in talks), default=0)
    if shared:
        if called[-1].tools not in {digest.tools for digest in known if digest.talk == called[shared].talk}:
            return "tools_changed"
        dropped = shared < len(messages) and messages[shared]["role"] not in ("assistant", "tool")
        return "compaction" if dropped and shorter else "history_edited"
    if asked[0].frame != called[-1].frame:
        return "sub_agent"
    talked = any(message["role"] in ("assistant", "tool") for message in messages)
    return "compaction" if talked and shorter else "new_conversation"


def _longest(turns: Sequence[Turn]) -> int:
    """Tokens of the longest conversation that the session had."""
    ends: dict[str | None, int] = {None: 0}
    for turn in turns:
        ends[turn.turn_id] = ends.get(turn.parent_id, 0) + len(turn.context_ids) + len(turn.output_ids)
    return max(ends.values())
