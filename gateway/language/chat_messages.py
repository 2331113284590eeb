"""Messages as a chat template can take them, whatever an agent or its model made of them.

Nothing that was said is lost and nothing earlier moves, so a conversation that grows keeps its beginning:

developer, function            ──▶ system, tool
system after the first place   ──▶ user, where the template refuses it
a tool's result without a call ──▶ user, where the template refuses it
arguments that are no object   ──▶ {"arguments": "their text"}, where the template would drop them
several calls in one message   ──▶ a message for each, where the template takes one and nothing beside it
a conversation without a user  ──▶ opens with an empty user message, where the template insists
lists of parts, null, stamps   ──▶ text, "", gone
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.language.families import Family

Message = dict[str, Any]
Tool = dict[str, Any]

ROLES = {"developer": "system", "function": "tool", "ipython": "tool"}
UNTRUSTED = frozenset({"user", "tool"})
"""Roles whose text comes from strangers: a control token that it spells stays text."""


def text_of(content: Any) -> str:
    """The text of a message, given as a string, as text blocks, or as null."""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else _text(part) for part in content or ())


def _text(part: Mapping[str, Any]) -> str:
    return part.get("text") or part.get("refusal") or ""


class MessageNormalizer:
    """Turns messages into what one family's template takes."""

    def __init__(
        self, family: Family, guard: Callable[[str], str], guard_answer: Callable[[str], str]
    ) -> None:
        self._family = family
        self._guard = guard
        self._guard_answer = guard_answer

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
        """A conversation from its beginning."""
        taken = self.tail(messages, ())
        opening = self._family.opening_user
        if opening == "never" or (opening == "with_tools" and not tools):
            return taken
        first = int(bool(taken) and taken[0]["role"] == "system")
        if first == len(taken) or taken[first]["role"] != "user":
            taken.insert(first, {"role": "user", "content": ""})
        return taken

    def tail(self, messages: Sequence[Message], before: Sequence[Message]) -> list[Message]:
        """The messages that follow `before`."""
        taken: list[Message] = []
        calls = _open_calls(before)
        for position, message in enumerate(messages, start=len(before)):
            role = message.get("role") or "user"
            role = ROLES.get(role, role)
            if role == "assistant":
                calls = _calls_of(message)
                taken += self._answer(message, calls)
                continue
            if role == "tool":
                taken.append(self._result(message, calls))
                continue
            if role != "system" or (position and not self._family.late_system):
                role = "user"
            calls = []
            taken.append(self._said(role, message))
        return taken

    def _said(self, role: str, message: Message) -> Message:
        text = text_of(message.get("content"))
        said: Message = {"role": role, "content": self._guard(text) if role in UNTRUSTED else text}
        if isinstance(name := message.get("name"), str) and name:
            said["name"] = self._guard(name)
        return said

    def _result(self, message: Message, calls: Sequence[Message]) -> Message:
        if not calls and not self._family.loose_results:
            return self._said("user", message)
        result = self._said("tool", message)
        call_id = message.get("tool_call_id")
        if isinstance(call_id, str):
            result["tool_call_id"] = self._guard(call_id)
        if self._family.named_results and "name" not in result:
            named = [call for call in calls if call.get("id") == call_id] or list(calls)
            result["name"] = named[0]["function"]["name"] if named else "tool"
        return result

    def _answer(self, message: Message, calls: Sequence[Message]) -> list[Message]:
        answer: Message = {
            "role": "assistant",
            "content": self._guard_answer(text_of(message.get("content"))),
        }
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            answer["reasoning_content"] = self._guard_answer(reasoning)
        if not calls:
            return [answer]
        made = [self._made(call) for call in calls]
        if self._family.parallel_calls:
            return [answer | {"tool_calls": made}]
        alone: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in made]
        return [answer, *alone] if answer["content"] else alone

    def _made(self, call: Message) -> Message:
        arguments: Any = self._guard_answer(call["function"]["arguments"])
        if not self._family.raw_arguments and not _is_object(arguments):
            arguments = {"arguments": arguments}
        made = call | {
            "function": {"name": self._guard_answer(call["function"]["name"]), "arguments": arguments}
        }
        if "id" in call:
            made["id"] = self._guard(call["id"])
        return made


def _open_calls(before: Sequence[Message]) -> list[Message]:
    """The calls that a result right after `before` answers."""
    for message in reversed(before):
        if message.get("role") == "assistant":
            return _calls_of(message)
        if ROLES.get(message.get("role", ""), message.get("role")) != "tool":
            break
    return []


def _calls_of(message: Message) -> list[Message]:
    """The calls of an answer in one shape; what is not there is empty."""
    calls: list[Message] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        made: Message = {
            "type": "function",
            "function": {"name": str(function.get("name") or ""), "arguments": arguments},
        }
        if isinstance(call.get("id"), str):
            made["id"] = call["id"]
        calls.append(made)
    return calls


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
