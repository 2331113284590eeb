"""Turns token ids, as they arrive, into the deltas that a streaming client reads.

ids ──▶ current region (content, reasoning, tool call) ──▶ text that is safe to send, or whole call ──▶ deltas

The text of a region is decoded incrementally. The whole answer is parsed again only where a region may end:
at a control token (`</think>`, `<tool_call>`), or at a tag that the family writes in ordinary tokens.
"""

import msgspec

from gateway.language.answers.partial_parse import PartialParse, PartialParser, Region, markup_of
from gateway.language.answers.streamed_text import IncrementalDetokenizer, StreamedText
from gateway.language.chat_messages import Tool
from gateway.language.parsed_answer import ParsedAnswer, ToolCall
from gateway.language.render import ChatRenderer
from rollout_queue.contract.tokens import TokenIds


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
        return deltas + self._append(ids)

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
        """The deltas that these ids add."""
        ids = self._last + ids
        # A stop token is not part of the text.
        count = len(ids) - (bool(ids) and ids[-1] in self._stop_ids)
        self._last = ids[count:]
        self._content.add(self._decoder.step(ids[:count]))
        return _texts("", self._content.release())

    def finish(self, answer: ParsedAnswer) -> list[Delta]:
        """The part of the final answer that was not sent yet."""
        return _texts("", self._content.rest(answer.content))


def _texts(reasoning: str, content: str) -> list[Delta]:
    deltas = [Delta(reasoning=reasoning)] if reasoning else []
    return [*deltas, Delta(content=content)] if content else deltas
