"""Recognizes side calls: requests that an agent's harness makes for itself, such as for a title.

The table has the sentences that Claude Code, Codex and opencode send. A harness that changes its sentence is
no longer recognized; its side calls are then trained like other calls.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gateway.language.chat_messages import Message, Tool, text_of

SideCall = Literal["title", "topic", "quota", "summary"]
"""title    a name for the conversation
topic    whether a message begins a new topic
quota    one token, to learn whether the key and the account work
summary  a text that replaces the conversation (compaction), or that describes it to the user"""

READ_CHARS = 4096
"""A sentence is looked for in so many characters at the beginning of a message."""


class Sentence(NamedTuple):
    """A part of a side call's system prompt or, if `asked`, of its last user message."""

    kind: SideCall
    text: str
    asked: bool = False


SENTENCES = (
    # Claude Code
    Sentence("title", "Generate a concise, sentence-case title (3-7 words) that captures the main topic"),
    Sentence("title", "You are coming up with a succinct title for a coding session"),
    Sentence(
        "title", "You are naming a coding session so the user can pick it out of a long list of sessions"
    ),
    Sentence("title", "Summarize this coding conversation in under 50 characters"),
    Sentence("title", "Please write a 5-10 word title for the following conversation", asked=True),
    Sentence("topic", "Analyze if this message indicates a new conversation topic"),
    Sentence("summary", "Your task is to create a detailed summary of the conversation so far", asked=True),
    Sentence("summary", "Your task is to create a detailed summary of the RECENT portion", asked=True),
    # Claude Code and opencode
    Sentence("summary", "You are a helpful AI assistant tasked with summarizing conversations"),
    # Codex
    Sentence("title", "your job is to provide a short title for a task that will be created", asked=True),
    Sentence("title", "Generate a concise, single-line task title of at most 36 characters", asked=True),
    Sentence("summary", "You are performing a CONTEXT CHECKPOINT COMPACTION", asked=True),
    # opencode
    Sentence("title", "You are a title generator. You output ONLY a thread title"),
    Sentence("summary", "You are an anchored context summarization assistant for coding sessions"),
    Sentence("summary", "Summarize what was done in this conversation. Write like a pull request"),
    Sentence("summary", "Provide a detailed prompt for continuing our conversation above", asked=True),
)
PROBES = ("quota", "test")
"""All that Claude Code's requests for one token say."""


def side_call_of(
    messages: Sequence[Message], tools: Sequence[Tool] | None, max_tokens: int | None
) -> SideCall | None:
    """The kind of side call, or None for a call of the agent itself.

    A summary, or a title for which the last user message asks, may have the conversation's own tools, so that
    its prompt is cached. Every other side call has no tools.
    """
    if not messages:
        return None
    last = messages[-1]
    asked = _beginning(last) if last.get("role") == "user" else ""
    if max_tokens == 1 and len(messages) == 1 and not tools and asked.strip() in PROBES:
        return "quota"
    first = messages[0]
    system = _beginning(first) if first.get("role") in ("system", "developer") else ""
    for sentence in SENTENCES:
        said = asked if sentence.asked else system
        if sentence.text in said and (sentence.asked or sentence.kind == "summary" or not tools):
            return sentence.kind
    return None


def _beginning(message: Message) -> str:
    return text_of(message.get("content"))[:READ_CHARS]
