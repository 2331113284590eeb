"""Token ids as they arrive, to the deltas that a streaming client reads.

ids ──▶ the open region (content, reasoning, tool call) ──▶ its certain text, or the whole call ──▶ deltas

The text of a region is decoded piece by piece. The whole answer is parsed only where a region may end: at a
control token (`</think>`, `<tool_call>`), or at a mark that the family spells as text.
"""

import msgspec

from gateway.language.partial_parse import PartialParse, PartialParser, Region, markup_of
from gateway.language.render import ChatRenderer, ParsedAnswer, Tool, ToolCall
from gateway.language.streamed_text import IncrementalDetokenizer, StreamedText
from rollout_queue.contract.tokens import TokenIds


class Delta(msgspec.Struct, frozen=True):
    """What one event adds: text, reasoning, or one whole tool call at its index."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None
    index: int = 0


class AnswerStream:
    """The deltas of one answer. They add up to what its parse says, and what was sent is never taken back."""

    def __init__(
        self,
        renderer: ChatRenderer,
        tools: list[Tool] | None,
        turn_id: str,
        stop: list[str],
        prompt_ids: TokenIds | None = None,
    ) -> None:
        self._markup = markup = markup_of(renderer)
        self._backend = renderer.tokenizer.backend
        self._stop_ids = frozenset(renderer.stop_ids)
        self._reader = PartialParser(renderer, tools, turn_id, prompt_ids)
        self._decoder = IncrementalDetokenizer(self._backend, markup.byte_ids)
        self._content = StreamedText((*stop, *markup.ends), markup.marks, "{" if markup.bare_calls else "")
        self._reasoning = StreamedText((), markup.marks)
        self._ids: list[int] = []
        self._region: Region | None = None
        self._begun = False
        self._calls = 0

    def feed(self, ids: list[int]) -> list[Delta]:
        """The deltas that these ids add."""
        deltas: list[Delta] = []
        if not self._begun:
            self._begun = True
            deltas = self._turn(self._reader.read(()))
        if not self._markup.control_ids.isdisjoint(ids):
            found = self._last_control(ids)
            self._ids += ids[: found + 1]
            deltas += self._at_control(ids[: found + 1])
            ids = ids[found + 1 :]
        self._ids += ids
        return deltas + self._flow(ids)

    def finish(self, answer: ParsedAnswer) -> list[Delta]:
        """What is left to send of the final answer."""
        deltas = _texts(self._reasoning.rest(answer.reasoning or ""), self._content.rest(answer.content))
        return deltas + self._missing(answer.tool_calls)

    def _last_control(self, ids: list[int]) -> int:
        control = self._markup.control_ids
        return next(at for at in range(len(ids) - 1, -1, -1) if ids[at] in control)

    def _at_control(self, ids: list[int]) -> list[Delta]:
        """The last of these ids may begin another region."""
        control_id = ids[-1]
        self._decoder = IncrementalDetokenizer(self._backend, self._markup.byte_ids)
        if control_id in self._stop_ids:
            self._region = None  # the end is near, and says the rest
            return []
        if self._region is None and control_id in self._markup.inner_ids:
            return []
        reading, frames = self._reader.read(self._ids), self._markup.frames
        for frame in {frames[token_id] for token_id in ids if token_id in frames}:
            if frame in reading.content:
                self._content.end_at(frame)
            if frame in reading.reasoning:
                self._reasoning.end_at(frame)
        return self._turn(reading)

    def _flow(self, ids: list[int]) -> list[Delta]:
        """More text of the open region."""
        if self._region is None or not ids:
            return []
        text = self._decoder.step(ids)
        if not text:
            return []
        channel = self._channel()
        if channel.add(text):
            known = self._ids[: len(self._ids) - len(self._decoder.held)]
            return self._turn(self._reader.read(known))
        certain = channel.release()
        return _texts("", certain) if channel is self._content else _texts(certain, "")

    def _turn(self, reading: PartialParse) -> list[Delta]:
        """Go on in the region that is open now."""
        self._region = reading.region
        same = self._content.restart(reading.content) and self._reasoning.restart(reading.reasoning)
        if not same:  # the parser takes back what it said; the end decides
            self._region = None
            return []
        deltas = _texts(self._reasoning.release(), self._content.release())
        return deltas + self._missing(reading.tool_calls)

    def _channel(self) -> StreamedText:
        return self._content if self._region == "content" else self._reasoning

    def _missing(self, calls: tuple[ToolCall, ...]) -> list[Delta]:
        """The calls that were not sent yet."""
        sent, self._calls = self._calls, max(self._calls, len(calls))
        return [Delta(tool_call=calls[index], index=index) for index in range(sent, len(calls))]


class RawTextStream:
    """The deltas of an answer without a chat template: its text as it is."""

    def __init__(self, renderer: ChatRenderer, stop: list[str]) -> None:
        self._stop_ids = frozenset(renderer.stop_ids)
        self._decoder = IncrementalDetokenizer(renderer.tokenizer.backend, markup_of(renderer).byte_ids)
        self._content = StreamedText(tuple(stop), as_it_is=True)
        self._last: list[int] = []

    def feed(self, ids: list[int]) -> list[Delta]:
        """The deltas that these ids add."""
        ids = self._last + ids
        # The token that ends the answer is none of its text.
        count = len(ids) - (bool(ids) and ids[-1] in self._stop_ids)
        self._last = ids[count:]
        self._content.add(self._decoder.step(ids[:count]))
        return _texts("", self._content.release())

    def finish(self, answer: ParsedAnswer) -> list[Delta]:
        """What is left to send of the final answer."""
        return _texts("", self._content.rest(answer.content))


def _texts(reasoning: str, content: str) -> list[Delta]:
    deltas = [Delta(reasoning=reasoning)] if reasoning else []
    return [*deltas, Delta(content=content)] if content else deltas
