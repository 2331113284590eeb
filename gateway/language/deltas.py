"""Turns token ids, as they arrive, into the deltas that a streaming client reads.

ids ──▶ current region (content, reasoning, tool call) ──▶ text that is safe to send, or whole call ──▶ deltas

The text of a region is decoded incrementally. The whole answer is parsed again only where a region may end:
at a control token (`</think>`, `<tool_call>`), or at a tag that the family writes in ordinary tokens.

Continues an answer whose beginning the request gives: Anthropic's prefill, and `continue_final_message`.

messages, beginning ──beginning──▶ ids after the prompt, up to the end of the beginning's text
these and the sampled ids ──parse──▶ the whole answer ──rest_of──▶ the part that the reply has

Keeps the stop string that ended an answer out of the answer, wherever it stands, whole or in part.

An engine looks for stop strings in all of its text: in thoughts and calls as well, and across their markers.
So they are looked for in the text of the tokens, and only the tokens before one are parsed.
"""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from gateway.errors import InvalidRequest, invalid
from gateway.language.chat_messages import Message, Tool
from gateway.language.parsed_answer import ParsedAnswer, ToolCall
from gateway.language.partial_parse import (
    IncrementalDetokenizer,
    PartialParse,
    PartialParser,
    Region,
    StreamedText,
    markup_of,
    start_of_partial,
)
from gateway.language.render import ChatRenderer
from gateway.language.tokenizer import BareTokenizer, GrowingText, text_and_ends
from rollout_queue.contract.packed_tokens import TokenIds


class Delta(msgspec.Struct, frozen=True):
    """What one streamed event adds: content, reasoning, or one whole tool call with its index."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None
    index: int = 0


class AnswerStream:
    """The deltas of one answer. Together they equal the parsed answer; nothing that was sent is revoked."""

    def __init__(
        self,
        renderer: ChatRenderer,
        tools: list[Tool] | None,
        turn_id: str,
        prompt_ids: TokenIds | None = None,
    ) -> None:
        self._markup = markup = markup_of(renderer)
        self._backend = renderer.tokenizer.backend
        self._stop_ids = frozenset(renderer.stop_ids)
        self._parser = PartialParser(renderer, tools, turn_id, prompt_ids)
        self._decoder = IncrementalDetokenizer(self._backend, markup.byte_ids)
        self._content = StreamedText(markup.ends, markup.tags, "{" if markup.bare_calls else "")
        self._reasoning = StreamedText((), markup.tags)
        self._ids: list[int] = []
        self._region: Region | None = None
        """None while nothing can be sent: in a tool call, or when only the whole answer tells the region."""
        self._started = False
        self._calls = 0

    def feed(self, ids: list[int]) -> list[Delta]:
        """The deltas that these ids add."""
        deltas: list[Delta] = []
        if not self._started:
            self._started = True
            deltas = self._enter(self._parser.parse(()))
        if not self._markup.control_ids.isdisjoint(ids):
            found = self._last_control(ids)
            self._ids += ids[: found + 1]
            deltas += self._at_control(ids[: found + 1])
            ids = ids[found + 1 :]
        self._ids += ids
        return deltas + self._append(ids) if deltas else self._append(ids)

    def finish(self, answer: ParsedAnswer) -> list[Delta]:
        """The part of the final answer that was not sent yet."""
        deltas = _texts(self._reasoning.rest(answer.reasoning or ""), self._content.rest(answer.content))
        return deltas + self._missing(answer.tool_calls)

    def _last_control(self, ids: list[int]) -> int:
        control = self._markup.control_ids
        return next(at for at in range(len(ids) - 1, -1, -1) if ids[at] in control)

    def _at_control(self, ids: list[int]) -> list[Delta]:
        """The deltas of ids whose last one is a control token, which may begin another region."""
        control_id = ids[-1]
        self._decoder = IncrementalDetokenizer(self._backend, self._markup.byte_ids)
        if control_id in self._stop_ids:
            self._region = None  # `finish` sends the rest
            return []
        if self._region is None and control_id in self._markup.inner_ids:
            return []
        parse, frames = self._parser.parse(self._ids), self._markup.frames
        for frame in {frames[token_id] for token_id in ids if token_id in frames}:
            if frame in parse.content:
                self._content.end_at(frame)
            if frame in parse.reasoning:
                self._reasoning.end_at(frame)
        return self._enter(parse)

    def _append(self, ids: list[int]) -> list[Delta]:
        """The deltas of ids that continue the current region."""
        if self._region is None or not ids:
            return []
        text = self._decoder.step(ids)
        if not text:
            return []
        streamed = self._content if self._region == "content" else self._reasoning
        if streamed.add(text):
            known = self._ids[: len(self._ids) - len(self._decoder.held)]
            return self._enter(self._parser.parse(known))
        safe = streamed.release()
        return _texts("", safe) if streamed is self._content else _texts(safe, "")

    def _enter(self, parse: PartialParse) -> list[Delta]:
        """Continue in the region in which the parse ends."""
        self._region = parse.region
        consistent = self._content.restart(parse.content) and self._reasoning.restart(parse.reasoning)
        if not consistent:  # the parser now reads earlier text differently: `finish` sends the rest
            self._region = None
            return []
        deltas = _texts(self._reasoning.release(), self._content.release())
        return deltas + self._missing(parse.tool_calls)

    def _missing(self, calls: tuple[ToolCall, ...]) -> list[Delta]:
        """The calls that were not sent yet."""
        sent, self._calls = self._calls, max(self._calls, len(calls))
        return [Delta(tool_call=calls[index], index=index) for index in range(sent, len(calls))]


class RawTextStream:
    """The deltas of an answer without a chat template: the decoded text, unchanged."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._stop_ids = frozenset(renderer.stop_ids)
        self._decoder = IncrementalDetokenizer(renderer.tokenizer.backend, markup_of(renderer).byte_ids)
        self._content = StreamedText((), keep_leading_space=True)
        self._last: list[int] = []

    def feed(self, ids: list[int]) -> list[Delta]:
        ids = self._last + ids
        # A stop token is not part of the text.
        count = len(ids) - (bool(ids) and ids[-1] in self._stop_ids)
        self._last = ids[count:]
        self._content.add(self._decoder.step(ids[:count]))
        return _texts("", self._content.release())

    def finish(self, answer: ParsedAnswer) -> list[Delta]:
        return _texts("", self._content.rest(answer.content))


def _texts(reasoning: str, content: str) -> list[Delta]:
    deltas = [Delta(reasoning=reasoning)] if reasoning else []
    if content:
        deltas.append(Delta(content=content))
    return deltas


MOST_AFTER = 8
"""The most tokens that a template writes after the text of an answer."""


def beginning(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Tool] | None, text: str
) -> TokenIds:
    """The ids that the template writes for an answer to `messages` that begins with `text`.

    Raises InvalidRequest if the template writes other text, or reads it otherwise: then no answer could
    continue it.
    """
    asked = renderer.render(messages, tools)
    written = renderer.render_answered([*messages, {"role": "assistant", "content": text}], tools)
    if written[: len(asked)] != asked:
        raise _cannot("the template begins an answer with a thought: turn thinking off")
    for end in range(len(written), max(len(asked), len(written) - MOST_AFTER - 1), -1):
        ids = TokenIds(written[len(asked) : end])
        if renderer.text_of(ids).endswith(text):
            read = renderer.parse(ids, tools, "", partial=True, prompt_ids=asked)
            if read.content == text.strip() and not read.reasoning and not read.tool_calls:
                return ids
    raise _cannot("the template does not keep its text as it is")


def rest_of(answer: ParsedAnswer, text: str) -> ParsedAnswer:
    """The answer without its beginning `text`."""
    content = answer.content.removeprefix(text.lstrip())
    return ParsedAnswer(content, answer.reasoning or None, answer.tool_calls)


class BegunAnswerStream:
    """The deltas of an answer without its beginning."""

    def __init__(self, whole: AnswerStream, begun_ids: Sequence[int], text: str) -> None:
        self._whole = whole
        self._text = text.lstrip()
        self._left = len(self._text)
        """How many characters of the beginning are still to come."""
        self.feed(list(begun_ids))

    def feed(self, ids: list[int]) -> list[Delta]:
        return self._after_beginning(self._whole.feed(ids))

    def finish(self, answer: ParsedAnswer) -> list[Delta]:
        """`answer` lacks the beginning."""
        whole = ParsedAnswer(self._text + answer.content, answer.reasoning, answer.tool_calls)
        return self._after_beginning(self._whole.finish(whole))

    def _after_beginning(self, deltas: list[Delta]) -> list[Delta]:
        new: list[Delta] = []
        for delta in deltas:
            cut = min(self._left, len(delta.content))
            self._left -= cut
            if not cut:
                new.append(delta)
            elif rest := delta.content[cut:]:
                new.append(Delta(content=rest))
        return new


def _cannot(why: str) -> InvalidRequest:
    return invalid("messages", f"the last message cannot be continued: {why}")


def before_stop(tokenizer: BareTokenizer, ids: Sequence[int], stop: str) -> list[int]:
    """The ids of the text before a stop string. Other ids stand for a part of a token before it."""
    text, ends = text_and_ends(ids, tokenizer.token_bytes)
    at = text.find(stop)
    if at < 0:
        return list(ids)
    known = max((end for end in ends if end <= at), default=0)
    whole = list(ids[: bisect_left(ends, known) + 1]) if known else []
    rest = text[known:at]
    return whole + (tokenizer.bytes.ids_of(rest) or tokenizer.encode(rest)) if rest else whole


class StoppedStream:
    """The deltas of an answer, without text that is a stop string, or that may become one."""

    def __init__(
        self,
        answer: AnswerStream | RawTextStream | BegunAnswerStream,
        tokenizer: BareTokenizer,
        stops: Sequence[str],
    ) -> None:
        self._answer = answer
        self._text = GrowingText(tokenizer.token_bytes)
        self._stops = stops
        self._held: list[tuple[int, int]] = []
        """The ids that were not passed on, each with the number of characters that it completes."""
        self._held_text = ""

    def feed(self, ids: list[int]) -> list[Delta]:
        for token_id in ids:
            text = self._text.add(token_id)
            self._held.append((token_id, len(text)))
            self._held_text += text
        return self._answer.feed(self._safe())

    def finish(self, answer: ParsedAnswer) -> list[Delta]:
        return self._answer.finish(answer)

    def _safe(self) -> list[int]:
        """Take the held ids that end before any stop string, or the beginning of one."""
        text, safe = self._held_text, len(self._held_text)
        for stop in self._stops:
            found = text.find(stop)
            safe = min(safe, found if found >= 0 else start_of_partial(text, stop))
        count = taken = 0
        while count < len(self._held) and taken + self._held[count][1] <= safe:
            taken += self._held[count][1]
            count += 1
        ids = [token_id for token_id, _ in self._held[:count]]
        self._held, self._held_text = self._held[count:], text[taken:]
        return ids
