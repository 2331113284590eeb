"""Changes conversations for own templates that would refuse them, or would not write all of them.

tools, calls, results       ──▶ text in Hermes' form, if the template writes none and a setting asks for it
system prompt               ──▶ the beginning of the first user message, if the template has no system role
neighbours of one role      ──▶ one message, if the template demands that roles alternate
a user message after a result ──▶ preceded by an empty answer, if the template demands one
texts of messages           ──▶ lists of one part, if the template reads no other content
arguments of calls          ──▶ objects, or JSON if the template writes no others

A conversation that grows is changed as before: only neighbours that no answer separates are joined.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.language.chat_messages import Message, Tool
from gateway.language.own.hermes import with_tool_prompt

BETWEEN = "\n\n"
"""Between texts that become one message."""


@dataclass(frozen=True)
class Adaptation:
    """What one template needs; the probe finds it out."""

    tool_prompt: bool = False
    system_in_user: bool = False
    joined_roles: frozenset[str] = frozenset()
    """Roles of which the template refuses neighbours."""
    answers_results: bool = False
    """The template refuses a user message that follows a tool's result."""
    parts: bool = False
    """The template reads contents that are lists of parts, and no texts."""
    text_arguments: bool = False
    """The template writes the arguments of calls that are JSON, and no objects."""

    def adapt(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
        """The messages that the template gets."""
        adapted = with_tool_prompt(messages, tools) if self.tool_prompt else list(messages)
        if self.system_in_user:
            adapted = _system_in_user(adapted)
        if self.joined_roles:
            adapted = _joined(adapted, self.joined_roles)
        if self.answers_results:
            adapted = _with_answers(adapted)
        if self.parts:
            adapted = [_in_parts(message) for message in adapted]
        return adapted if self.text_arguments else [with_objects(message) for message in adapted]


def with_objects(message: Message) -> Message:
    """The message with the arguments of its calls as objects, which most templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _system_in_user(messages: list[Message]) -> list[Message]:
    if not messages or messages[0]["role"] != "system":
        return messages
    system = {**messages[0], "role": "user"}
    if len(messages) > 1 and messages[1]["role"] == "user":
        return [_one(system, messages[1]), *messages[2:]]
    return [system, *messages[1:]]


def _joined(messages: list[Message], roles: frozenset[str]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if last.get("role") == message["role"] in roles and not last.get("tool_calls"):
            joined[-1] = _one(last, message)
        else:
            joined.append(message)
    return joined


def _with_answers(messages: list[Message]) -> list[Message]:
    answered: list[Message] = []
    for message in messages:
        if message["role"] == "user" and answered and answered[-1]["role"] == "tool":
            answered.append({"role": "assistant", "content": ""})
        answered.append(message)
    return answered


def _one(first: Message, second: Message) -> Message:
    """Two neighbours as one message: their texts, and what else either has."""
    one = {**first, **second}
    for field in ("content", "reasoning_content"):
        if field in one:
            one[field] = BETWEEN.join(filter(None, (first.get(field), second.get(field))))
    return one
