"""Makes the answer that an agent reads from what the library's parser finds in the sampled ids.

calls that can be read     ──▶ tool calls, with the arguments as they were sampled
calls that cannot be read  ──▶ content, as they were sampled, marks included
what the parser fails at   ──▶ content, with all that follows it

`extension` asks the library's template what new messages add after a sampled answer.
"""

import json
import re
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from renderers import ParsedResponse, ToolCallParseStatus

from gateway.language.chat_messages import Message, Tool, arguments_text, encodable
from gateway.language.tokenizer import BareTokenizer

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What the library raises for messages or answers that it cannot read, such as 10 000 nested brackets."""


def extension(
    template: Any,
    prompt: list[int],
    output: list[int],
    new: Sequence[Message],
    tools: list[Tool] | None,
) -> list[int] | None:
    """The ids after the output; None if the template would change earlier ids, or cannot read `new`."""
    try:
        bridged = template.bridge_to_next_turn(prompt, output, new, tools=tools)
    except UNREADABLE:
        return None
    known = prompt + output
    if bridged is None or bridged.token_ids[: len(known)] != known:
        return None
    added: list[int] = bridged.token_ids[len(known) :]
    return added


def after_any_answer(
    template: Any, answers: Sequence[list[int]], new: Sequence[Message], tools: list[Tool] | None
) -> list[int] | None:
    """The ids that follow the first of the answers, which have no calls, that the library continues.

    It continues no answer that ends inside its thought, or with a token that ends no message.
    """
    if any(message.get("role") == "tool" for message in new):
        return None
    found = (extension(template, answer[-1:], answer, new, tools) for answer in answers)
    return next((ids for ids in found if ids is not None), None)


CLOSINGS = ("</think>", "</think:opensource>", "<channel|>", "<|end_message|>", "<|end|>")
"""The ends of thoughts. The first one that is a token ends the thoughts of a model."""
SEGMENT_HEADS = ("<|content_text|>", "<|message|>")
"""A vocabulary with one of these tokens belongs to a template that writes a header before each part of an
answer, so its parts are no text that goes on."""
PLACE = f"c{uuid4().hex}."
"""A text that no model writes. With a number, it stands for a call."""
MOST_VALUES = 64
"""In so many places of a call its arguments are looked for."""
MOST_LEVELS = 64
"""Levels of lists and objects in the arguments of a call. Python's JSON reads about 900, fewer where more of
its stack is in use: an answer would not be read twice in the same way."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call as the model wrote it; `arguments` is the text, which may be invalid JSON."""

    call_id: str
    name: str
    arguments: str


class ParsedAnswer(msgspec.Struct, frozen=True):
    """A sampled answer, parsed into what an agent reads."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class SampledIds(NamedTuple):
    """What the library's parser reads."""

    ids: list[int]
    """Without the token that ended them."""
    prompt: list[int] | None
    """The end of the prompt, if it is known."""
    parse: Callable[[list[int], list[int] | None], ParsedResponse]
    """The parser of such ids and of such a prompt."""


class AnswerReader:
    """Reads answers of one model."""

    def __init__(self, tokenizer: BareTokenizer) -> None:
        self._tokenizer = tokenizer
        self._segmented = any(self._is_token(head) for head in SEGMENT_HEADS)
        self.closing = tokenizer.encode(next(filter(self._is_token, CLOSINGS), CLOSINGS[0]))
        """The ids that end a thought."""

    def _is_token(self, text: str) -> bool:
        return self._tokenizer.backend.token_to_id(text) in self._tokenizer.added_ids

    def answer(
        self, parsed: ParsedResponse, sampled: SampledIds, turn_id: str, partial: bool
    ) -> ParsedAnswer:
        """The answer. In a `partial` one, a call at its end is left out: later tokens may complete it."""
        calls = [
            ToolCall(call.id or f"call_{turn_id}_{number}", encodable(call.name), _arguments(call))
            for number, call in enumerate(filter(_readable, parsed.tool_calls))
        ]
        content = parsed.content
        if len(calls) < len(parsed.tool_calls):
            if self._segmented or any(call.token_span is None for call in parsed.tool_calls):
                content = self._appended(parsed, sampled.ids, partial)
            else:
                content = self._in_place(parsed, sampled, partial)
        reasoning = parsed.reasoning_content
        # Parsers differ in the outer whitespace that they keep, and streams do not send it: drop it.
        return ParsedAnswer(content.strip(), reasoning.strip() if reasoning else reasoning, tuple(calls))

    def answer_in_part(self, sampled: SampledIds, turn_id: str) -> ParsedAnswer:
        """The answer of ids that the library cannot read: what it can read of them, and the rest as text.

        It fails where a mark ends a call, such as one with a number of 5000 digits.
        """
        ids, known, read = sampled.ids, ParsedAnswer(""), 0
        marks = [at for at, token_id in enumerate(ids) if token_id in self._tokenizer.added_ids]
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high) // 2
            part = sampled._replace(ids=ids[: marks[middle]])
            try:
                known = self.answer(sampled.parse(part.ids, sampled.prompt), part, turn_id, partial=False)
                low, read = middle + 1, marks[middle]
            except UNREADABLE:
                high = middle
        before = self._text(ids[:read])
        content = known.content + before[len(before.rstrip()) :] + self._text(ids[read:])
        return msgspec.structs.replace(known, content=content.strip())

    def _appended(self, parsed: ParsedResponse, ids: list[int], partial: bool) -> str:
        """The content, followed by the calls that cannot be read."""
        content, whole = parsed.content.strip(), self._text(ids)
        for call in () if partial else parsed.tool_calls:
            if not _readable(call):
                text = self._text(ids[slice(*call.token_span)]) if call.token_span else call.raw
                at = -1 if self._segmented else whole.rfind(text)
                content += ("\n" if at < 0 else whole[len(whole[:at].rstrip()) : at]) + text
        return str(content)

    def _in_place(self, parsed: ParsedResponse, sampled: SampledIds, partial: bool) -> str:
        """The content, in which the calls that cannot be read stand where they were sampled."""
        calls, ids = parsed.tool_calls, sampled.ids
        if partial and all(_unfinished(call, ids) for call in calls if not _readable(call)):
            return str(parsed.content)
        # The parser knows where thoughts are between calls. It reads a text in the place of each call.
        blocks = [(span, list(block)) for span, block in groupby(calls, lambda call: call.token_span)]
        (at, _), first = blocks[0]
        content = self._before(sampled, at, all(map(_readable, first)))
        rest, texts = list[int](), dict[str, str]()
        for (start, end), block in blocks:
            rest += ids[at:start]
            if partial and _unfinished(block[-1], ids):
                break
            if sampled.parse(rest, None).reasoning_complete is False:
                rest += self.closing  # the call ended a thought
            place = f"{PLACE}{len(texts)}."
            texts[place] = "" if all(map(_readable, block)) else self._text(ids[start:end])
            rest += self._tokenizer.encode(place)
            at = end
        else:
            rest += ids[at:]
        said = str(sampled.parse(rest, None).content)
        for place, text in texts.items():
            said = said.replace(place, text)
        return content + said

    def _before(self, sampled: SampledIds, end: int, readable: bool) -> str:
        """The content before the first call, which begins at `end`, with marks such as that of a section. If
        the call can be read, the marks are its own."""
        ids = sampled.ids[:end]
        text, read = self._text(ids), sampled.parse(ids, sampled.prompt)
        content = read.content.strip()
        if content and content in text:
            rest = text[text.rfind(content) + len(content) :]
        else:
            closed = max((text.rfind(tag) + len(tag) for tag in CLOSINGS if tag in text), default=0)
            rest = text[closed:] if closed or read.reasoning_content is None else ""
        return f"{content}{rest[len(rest.rstrip()) :] if readable else rest}"

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def _readable(call: Any) -> bool:
    named = call.status is ToolCallParseStatus.OK and bool(call.name) and isinstance(call.name, str)
    return named and within_levels(call.arguments)


def within_levels(arguments: Any, levels: int = MOST_LEVELS) -> bool:
    """Whether the lists and objects of the arguments have at most so many levels."""
    inner = arguments.values() if isinstance(arguments, dict) else arguments
    if not isinstance(arguments, dict | list):
        return True
    return levels > 0 and all(within_levels(each, levels - 1) for each in inner)


def _unfinished(call: Any, ids: Sequence[int]) -> bool:
    return call.status is ToolCallParseStatus.UNCLOSED_BLOCK or call.token_span[1] >= len(ids)


def _arguments(call: Any) -> str:
    """The arguments as they were sampled, if they are JSON within the call; else as JSON."""
    given = call.arguments
    if not isinstance(given, dict | list):
        return arguments_text(given)
    decode, wanted = json.JSONDecoder().raw_decode, repr(given)
    for found in islice(re.finditer(r"[{\[]", call.raw), MOST_VALUES):
        try:
            value, end = decode(call.raw, found.start())
        except ValueError:
            continue
        if repr(value) == wanted:
            return str(call.raw[found.start() : end])
    return arguments_text(given)
