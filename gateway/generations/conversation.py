"""Finds the turn of a session that a call continues, and the tokens that the call adds to it.

messages ──digests──▶ the turn that they continue ──bridge──▶ its tokens, then those of the new messages
                      if none, or bridging fails ──render──▶ all tokens ──▶ the deepest turn with which
                                                                            they begin

To bridge keeps the turn's tokens as they were sampled, and encodes only the new messages. To render encodes
the whole conversation again. If the prompt extends no turn, a `Reason` says why.

root ─ a ─ b        A prompt that begins with all tokens of root and a, but not with those of b, becomes a
     └ c            child of a. So the tokens that branches share are stored once.

A prompt of `/v1/completions` has no messages: its token ids alone tell its parent.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec

from gateway.counters import CountedCache
from gateway.generations.digests import NO_TOOLS, Digest, chain
from gateway.language.chat_messages import Message, Tool
from gateway.language.image_pads import images_of, placed
from gateway.language.parsed_answer import ParsedAnswer
from gateway.language.partial_parse import fast_parser
from gateway.language.render import ChatRenderer
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.packed_tokens import TokenIds, pack
from rollout_queue.contract.records import Relation, Turn, TurnImage

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


CACHED_PROMPTS, MAX_CACHED_BYTES = 256, 32 * 2**10
"""How many first prompts of conversations are cached, and how many bytes of JSON one may have."""


class Prompt(msgspec.Struct, frozen=True):
    """The position of a call in its session's tree, and the ids that it adds there."""

    parent: Turn | None
    relation: Relation
    """`rerendered`: the call continues a turn, but the template changes the tokens of its conversation."""
    reason: str | None
    """A `Reason`; None if the call is the first of its session, or extends its parent."""
    context_ids: TokenIds
    """The ids after the parent's last token; the whole prompt if there is no parent."""
    prompt_ids: TokenIds
    """The whole prompt, as the engine receives it."""
    digest: bytes
    """Identifies the prompt: the digest of its messages, or that of its ids if it has no messages."""
    begun: int = 0
    """How many of the last ids are the beginning of the answer, which the call gives."""
    images: tuple[TurnImage, ...] = ()
    """All images of the prompt, with their places among `prompt_ids`."""

    @property
    def own_images(self) -> tuple[TurnImage, ...]:
        """The images among `context_ids`, with their places there."""
        end = len(self.prompt_ids)
        return images_within(self.images, end - len(self.context_ids), end)

    def begin_answer(self, ids: TokenIds) -> "Prompt":
        """The prompt with the beginning of the answer."""
        return msgspec.structs.replace(
            self,
            context_ids=TokenIds([*self.context_ids, *ids]),
            prompt_ids=TokenIds([*self.prompt_ids, *ids]),
            begun=len(ids),
        )


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
    """Find the parent of a call and the ids that the call adds, by bridging or else by rendering."""
    turns = live_turns(head) if head.turns else []
    if not turns:
        encoded = msgspec.json.encode((messages, tools))
        if len(encoded) > MAX_CACHED_BYTES:
            return _root(renderer, messages, tools)
        return FIRST_PROMPTS.lookup(renderer, encoded, renderer.today())
    digests = chain(tools, messages)
    continued, end = _continued(turns, messages, digests)
    if continued is not None:
        thoughtful = partial(_thoughtful, renderer, head, continued, messages[:end], tools)
        added = renderer.bridge(
            continued.context_ids, continued.output_ids, messages[end:], tools, messages[:end], thoughtful
        )
        if added is not None:
            prompt_ids, output_ids = head.branch_ids(continued)
            prompt_ids += output_ids
            new = [each.moved(len(prompt_ids)) for each in _placed(renderer, added, messages[end:])]
            prompt_ids += added
            relation, reason = _relation_to(continued, turns, digests[-1])
            images = (*head.branch_images(continued), *new)
            return Prompt(continued, relation, reason, added, prompt_ids, digests[-1], images=images)
    prompt_ids = renderer.render(messages, tools)
    images = _placed(renderer, prompt_ids, messages)
    parent, known = deepest_match(turns, prompt_ids, images)
    if continued is None or parent is continued:
        relation, reason = _relation(parent, turns, messages, digests, len(prompt_ids))
    elif any(message["role"] == "assistant" for message in messages[end:]):
        relation, reason = "forks", "history_edited"
    else:
        relation, reason = "rerendered", "template_rewrites_history"
    context_ids = TokenIds(prompt_ids[known:])
    return Prompt(parent, relation, reason, context_ids, prompt_ids, digests[-1], images=images)


def _first_prompt(renderer: ChatRenderer, encoded: bytes, today: str) -> Prompt:
    """The prompt of a session's first call; `encoded` is its messages and tools as JSON.

    It is cached, because all sessions of a group begin with the same prompt. `today` is only a part of the
    cache's key: templates may write the date.
    """
    return _root(renderer, *msgspec.json.decode(encoded))


FIRST_PROMPTS = CountedCache(_first_prompt, CACHED_PROMPTS)


def _root(renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Prompt:
    prompt_ids = renderer.render(messages, tools)
    images = _placed(renderer, prompt_ids, messages)
    return Prompt(None, "root", None, prompt_ids, prompt_ids, chain(tools, messages)[-1], images=images)


def _thoughtful(
    renderer: ChatRenderer,
    head: SessionHead,
    last: Turn,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
) -> bool:
    """Whether there is a thought since the last message of a user; templates have dropped earlier ones.

    The sampled tokens tell, because many agents send no thoughts back; the messages of answers that are not
    among the turns before `last` do.
    """
    asked = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    answers = [message for message in messages[asked + 1 :] if message["role"] == "assistant"]
    turns = head.lineage_of(last)[-len(answers) :]
    plain = fast_parser(renderer).read  # spares most turns the library's parser, which takes far longer
    if any(
        plain(turn.output_ids, turn.context_ids) is None
        and renderer.thinks_in(turn.context_ids, turn.output_ids, tools)
        for turn in reversed(turns)
    ):
        return True
    other = answers[: -len(turns)]
    return any(answer.get("reasoning_content") or answer.get("reasoning") for answer in other)


def _placed(renderer: ChatRenderer, ids: TokenIds, messages: Sequence[Message]) -> tuple[TurnImage, ...]:
    """The images of messages, with their places among the ids that the messages have."""
    return () if renderer.vision is None else placed(ids, images_of(messages), renderer.vision)


def _continued(
    turns: Sequence[Turn], messages: Sequence[Message], digests: Sequence[bytes]
) -> tuple[Turn | None, int]:
    """The turn with the longest conversation, its answer included, that the call begins with; and how many
    messages that conversation has; (None, 0) without one."""
    by_reply: dict[str, list[Turn]] = {}
    for turn in turns:
        by_reply.setdefault(turn.reply_digest, []).append(turn)
    for end in range(len(messages) - 1, 0, -1):
        answer = messages[end - 1]
        if answer["role"] == "assistant" and (same := by_reply.get(digests[end].hex())):
            return _named_by(same, answer), end
    return None, 0


def _named_by(same: Sequence[Turn], answer: Message) -> Turn:
    """Of turns with equal conversations, the one whose tool call ids the client sends; else the latest."""
    ids = "".join(str(call.get("id")) for call in answer.get("tool_calls") or ()) if len(same) > 1 else ""
    return next((turn for turn in same if turn.turn_id in ids), same[-1])


def _relation(
    parent: Turn | None,
    turns: Sequence[Turn],
    messages: Sequence[Message],
    digests: Sequence[bytes],
    length: int,
) -> tuple[Relation, Reason | None]:
    """The relation of a prompt, and its reason; `parent` is the turn whose tokens it begins with, if any."""
    if parent is not None:
        return _relation_to(parent, turns, digests[-1])
    return "forks", why_forked(turns, messages, digests, length)


def _relation_to(parent: Turn, turns: Sequence[Turn], digest: bytes) -> tuple[Relation, Reason | None]:
    """The first child of a turn extends it; any other child is a fork."""
    siblings = [turn.prompt_digest for turn in turns if turn.parent_id == parent.turn_id]
    if not siblings:
        return "extends", None
    return "forks", "sampled_again" if digest.hex() in siblings else "history_edited"


def locate_raw(head: SessionHead, prompt_ids: TokenIds) -> Prompt:
    """Place the prompt below the deepest turn whose prompt and output it begins with."""
    digest = hashlib.sha256(pack(prompt_ids)).digest()
    turns = live_turns(head)
    parent, known = deepest_match(turns, prompt_ids)
    added = TokenIds(prompt_ids[known:])
    if parent is not None:
        has_child = any(turn.parent_id == parent.turn_id for turn in turns)
        return Prompt(
            parent,
            "forks" if has_child else "extends",
            "history_edited" if has_child else None,
            added,
            prompt_ids,
            digest,
        )
    if turns:
        again = any(turn.prompt_digest == digest.hex() for turn in turns)
        reason = "sampled_again" if again else "new_conversation"
        return Prompt(None, "forks", reason, prompt_ids, prompt_ids, digest)
    return Prompt(None, "root", None, prompt_ids, prompt_ids, digest)
