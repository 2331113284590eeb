"""Normalizes an agent's messages to what a chat template accepts.

No text is lost. When a conversation grows, its earlier messages are normalized as before:

developer, function            ──▶ system, tool
system after the first place   ──▶ user, if the template refuses it
a tool's result without a call ──▶ user, if the template refuses it
arguments as an object's JSON  ──▶ with the spaces that templates write, because clients drop them
arguments that say nothing     ──▶ {}
arguments that are no object   ──▶ {"arguments": "their text"}, if the template would drop them
ids of calls                   ──▶ nine characters, if the template refuses others
several calls in one message   ──▶ one message each, if the template accepts only one call and no text
a conversation without a user  ──▶ begins with an empty user message, if the template requires one
content as a list of parts     ──▶ the text of the parts; parts without text are dropped, except images
content null                   ──▶ ""
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from math import isfinite, isnan
from typing import Any

from gateway.language.families import Family
from gateway.language.image_pads import IMAGE, has_image

Message = dict[str, Any]
Tool = dict[str, Any]

ROLES = {"developer": "system", "function": "tool", "ipython": "tool"}
RESULTS = ("tool", "function")
"""Roles of messages that bring the result of a call."""
ID_LENGTH = 9
NONE = ("", "null", "[]")
"""What clients and models write for the arguments of a call that has none."""
UNTRUSTED = frozenset({"user", "tool"})
"""Roles whose text is not trusted, so all control tokens in it are escaped."""


def text_of(content: Any) -> str:
    """The text of a message, given as a string, as text blocks, or as null."""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else _text(part) for part in content or ())


def _text(part: Mapping[str, Any]) -> str:
    return part.get("text") or part.get("refusal") or ""


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the results of each answer's calls in the order of the calls.

    Agents send results as their tools finish, and some templates write no ids: such a model would read one
    call's result as another's. Results of unknown calls come last.
    """
    ordered, start = list(messages), 0
    if all(message.get("role") not in RESULTS for message in ordered):
        return ordered
    while start < len(ordered):
        end = start + 1
        if not _is_result(ordered[start]):
            start = end
            continue
        while end < len(ordered) and _is_result(ordered[end]):
            end += 1
        if end - start > 1 and start and ordered[start - 1].get("role") == "assistant":
            calls = [call.get("id") for call in ordered[start - 1].get("tool_calls") or ()]
            ordered[start:end] = sorted(ordered[start:end], key=lambda result: _position(result, calls))
        start = end
    return ordered


def _is_result(message: Message) -> bool:
    return message.get("role") in RESULTS


def _position(result: Message, calls: Sequence[Any]) -> int:
    call_id = result.get("tool_call_id")
    return calls.index(call_id) if call_id in calls else len(calls)


class MessageNormalizer:
    """Normalizes messages for one family's template.

    `escape` escapes control tokens in a text of users and tools, `escape_answer` in a text of the assistant,
    `escape_system` in a system prompt.
    """

    def __init__(
        self,
        family: Family,
        escape: Callable[[str], str],
        escape_answer: Callable[[str], str],
        escape_system: Callable[[str], str] = str,
    ) -> None:
        self._family = family
        self._escape = escape
        self._escape_answer = escape_answer
        self._escape_system = escape_system

    def conversation(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
        """Normalize a whole conversation."""
        normalized = self.continuation(messages, ())
        opening = self._family.opening_user
        if opening == "never" or (opening == "with_tools" and not tools):
            return normalized
        first = int(bool(normalized) and normalized[0]["role"] == "system")
        if first == len(normalized) or normalized[first]["role"] != "user":
            normalized.insert(first, {"role": "user", "content": ""})
        return normalized

    def continuation(self, messages: Sequence[Message], before: Sequence[Message]) -> list[Message]:
        """Normalize messages that follow the messages `before`."""
        normalized: list[Message] = []
        calls = _open_calls(before)
        for position, message in enumerate(messages, start=len(before)):
            role = message.get("role") or "user"
            role = ROLES.get(role, role)
            if role == "assistant":
                calls = _calls_of(message)
                normalized += self._answer(message, calls)
                continue
            if role == "tool":
                normalized.append(self._result(message, calls))
                continue
            if role != "system" or not (self._family.late_system if position else self._family.system):
                role = "user"
            calls = []
            normalized.append(self._text_message(role, message))
        return normalized

    def _text_message(self, role: str, message: Message) -> Message:
        content, escape = message.get("content"), self._escape if role in UNTRUSTED else self._escape_system
        normalized: Message = {"role": role}
        if isinstance(content, list) and has_image(content):
            normalized["content"] = list(_parts(content, escape))
        else:
            normalized["content"] = escape(text_of(content))
        if isinstance(name := message.get("name"), str) and name:
            normalized["name"] = self._escape(name)
        return normalized

    def _result(self, message: Message, calls: Sequence[Message]) -> Message:
        if not calls and not self._family.loose_results:
            return self._text_message("user", message)
        result = self._text_message("tool", message)
        call_id = message.get("tool_call_id")
        if isinstance(call_id, str):
            result["tool_call_id"] = self._escape(self._call_id(call_id))
        if self._family.named_results and "name" not in result:
            named = [call for call in calls if call.get("id") == call_id] or list(calls)
            result["name"] = named[0]["function"]["name"] if named else "tool"
        return result

    def _answer(self, message: Message, calls: Sequence[Message]) -> list[Message]:
        answer: Message = {
            "role": "assistant",
            "content": self._escape_answer(text_of(message.get("content"))),
        }
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            answer["reasoning_content"] = self._escape_answer(reasoning)
        if not calls:
            return [answer]
        made = [self._call(call) for call in calls]
        if self._family.parallel_calls:
            return [answer | {"tool_calls": made}]
        alone: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in made]
        return [answer, *alone] if answer["content"] else alone

    def _call(self, call: Message) -> Message:
        arguments: Any = self._escape_answer(call["function"]["arguments"])
        if not self._family.raw_arguments and not _is_object(arguments):
            arguments = {"arguments": arguments}
        made = call | {
            "function": {"name": self._escape_answer(call["function"]["name"]), "arguments": arguments}
        }
        if "id" in call:
            made["id"] = self._escape(self._call_id(call["id"]))
        return made

    def _call_id(self, call_id: str) -> str:
        if not self._family.nine_character_ids or (len(call_id) == ID_LENGTH and call_id.isalnum()):
            return call_id
        return sha256(call_id.encode(errors="backslashreplace")).hexdigest()[:ID_LENGTH]


def _parts(content: Sequence[Any], escape: Callable[[str], str]) -> Iterator[Message]:
    """The parts of a content with images. Texts next to each other become one, as templates join them: else
    a control token that is split among them would not be escaped."""
    for is_image, parts in groupby(content, key=lambda part: has_image([part])):
        if is_image:
            yield from ({"type": IMAGE} for _ in parts)
        else:
            yield {"type": "text", "text": escape(text_of(list(parts)))}


def _open_calls(before: Sequence[Message]) -> list[Message]:
    """The calls that a tool's result directly after `before` would answer."""
    for message in reversed(before):
        if message.get("role") == "assistant":
            return _calls_of(message)
        if ROLES.get(message.get("role", ""), message.get("role")) != "tool":
            break
    return []


def _calls_of(message: Message) -> list[Message]:
    """The calls of an answer, all in the same shape; missing fields are empty."""
    calls: list[Message] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = given_arguments(function.get("arguments"))
        arguments = _rewritten(arguments) if isinstance(arguments, str) else arguments_text(arguments)
        made: Message = {
            "type": "function",
            "function": {"name": str(function.get("name") or ""), "arguments": arguments},
        }
        if isinstance(call.get("id"), str):
            made["id"] = call["id"]
        calls.append(made)
    return calls


def given_arguments(arguments: Any) -> Any:
    """The arguments of a call; of a call without any, in whatever form, those of an empty object."""
    none = arguments is None or arguments == [] or (isinstance(arguments, str) and arguments.strip() in NONE)
    return "{}" if none else arguments


def _rewritten(arguments: str) -> str:
    """The JSON of an object, with the spaces that templates write; any other text unchanged."""
    parsed = _object_of(arguments)
    try:
        return arguments if parsed is None else arguments_text(parsed)
    except RecursionError:
        return arguments


def _is_object(arguments: str) -> bool:
    return _object_of(arguments) is not None


def _object_of(arguments: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def arguments_text(arguments: Any) -> str:
    """The arguments as templates write them, so that rendering the history again gives the sampled tokens.

    A number that JSON cannot express becomes its name as text: `"NaN"`.
    """
    if isinstance(arguments, str):
        return encodable(arguments)
    value = {} if arguments is None else arguments
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        value = _lawful(value)
        text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value)
    return text


def _lawful(value: Any) -> Any:
    """The value with texts in place of numbers that JSON cannot express."""
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _lawful(each) for name, each in value.items()}
    return [_lawful(each) for each in value] if isinstance(value, list) else value


def encodable(text: str) -> str:
    """The text with unpaired surrogates escaped, which UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()
