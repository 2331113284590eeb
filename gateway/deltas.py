"""Token ids as they arrive, to the deltas that a streaming client reads.

Plain text is decoded one token at a time. From the first control token on (`<think>`, `<tool_call>`) the
renderer's parser reads the answer so far, and what it adds is sent: a tool call when it is whole.
"""

from dataclasses import dataclass

from tokenizers.decoders import DecodeStream

from gateway.render import Answer, ChatRenderer, Tool, ToolCall


@dataclass(frozen=True)
class Delta:
    """What one event adds: text, reasoning, or one whole tool call at its index."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None
    index: int = 0


class AnswerStream:
    """The deltas of one answer. What was sent is never taken back."""

    def __init__(
        self, renderer: ChatRenderer, tools: list[Tool] | None, turn_id: str, stop: list[str]
    ) -> None:
        self._renderer = renderer
        self._tools = tools
        self._turn_id = turn_id
        self._stop = stop
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._stop_ids = frozenset(renderer.stop_ids)
        self._ids: list[int] = []
        self._text = ""
        self._structured = False
        self._sent = Answer("")

    def feed(self, ids: list[int]) -> list[Delta]:
        """The deltas that these ids add."""
        tokenizer = self._renderer.tokenizer
        for token_id in ids:
            self._ids.append(token_id)
            if token_id in self._stop_ids:
                continue
            if token_id in tokenizer.added_ids:
                self._structured = True
            if not self._structured:
                self._text += self._decoder.step(tokenizer.backend, token_id) or ""
        if self._structured:
            answer = self._renderer.parse(self._ids, self._tools, self._turn_id, partial=True)
            reasoning = (answer.reasoning or "").rstrip().rstrip("\ufffd")
            return self._advance(Answer(self._safe(answer.content), reasoning, answer.tool_calls))
        return self._advance(Answer(self._safe(self._text.lstrip())))

    def finish(self, answer: Answer) -> list[Delta]:
        """What is left to send of the final answer."""
        return self._advance(answer)

    def _safe(self, text: str) -> str:
        """Text that no later token can change: no trailing space, half a character or half a stop string."""
        for stop in self._stop:
            found = text.find(stop)
            if found >= 0:
                return text[:found].rstrip()
        longest = max((_overlap(text, stop) for stop in self._stop), default=0)
        return text[: len(text) - longest].rstrip().rstrip("\ufffd")

    def _advance(self, answer: Answer) -> list[Delta]:
        sent, deltas = self._sent, []
        # The parser strips reasoning once it has ended, and not before.
        reasoning, known = (answer.reasoning or "").lstrip(), sent.reasoning or ""
        if len(reasoning) > len(known) and reasoning.startswith(known):
            deltas.append(Delta(reasoning=reasoning[len(known) :]))
        else:
            reasoning = known
        content = sent.content
        if len(answer.content) > len(content) and answer.content.startswith(content):
            deltas.append(Delta(content=answer.content[len(content) :]))
            content = answer.content
        calls = answer.tool_calls
        deltas += [Delta(tool_call=calls[i], index=i) for i in range(len(sent.tool_calls), len(calls))]
        kept = calls if len(calls) > len(sent.tool_calls) else sent.tool_calls
        self._sent = Answer(content, reasoning, kept)
        return deltas


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
