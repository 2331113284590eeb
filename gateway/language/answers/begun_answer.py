"""Continues an answer whose beginning the request gives: Anthropic's prefill, and `continue_final_message`.

messages, beginning ──beginning──▶ ids after the prompt, up to the end of the beginning's text
these and the sampled ids ──parse──▶ the whole answer ──rest_of──▶ the part that the reply has
"""

from collections.abc import Sequence

from gateway.errors import InvalidRequest
from gateway.language.answers.deltas import AnswerStream, Delta
from gateway.language.chat_messages import Message, Tool
from gateway.language.parsed_answer import ParsedAnswer
from gateway.language.render import ChatRenderer
from rollout_queue.contract.tokens import TokenIds

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
        """The deltas that these ids add."""
        return self._after_beginning(self._whole.feed(ids))

    def finish(self, answer: ParsedAnswer) -> list[Delta]:
        """The part of the final answer that was not sent yet. `final` lacks the beginning."""
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
    return InvalidRequest(f"messages: the last message cannot be continued: {why}", param="messages")
