"""Keeps the stop string that ended an answer out of the answer, wherever it stands, whole or in part.

An engine looks for stop strings in all of its text: in thoughts and calls as well, and across their markers.
So they are looked for in the text of the tokens, and only the tokens before one are parsed.
"""

from bisect import bisect_left
from collections.abc import Sequence

from gateway.language.answers.begun_answer import BegunAnswerStream
from gateway.language.answers.deltas import AnswerStream, Delta, RawTextStream
from gateway.language.answers.streamed_text import start_of_partial
from gateway.language.parsed_answer import ParsedAnswer
from gateway.language.token_bytes import GrowingText, text_and_ends
from gateway.language.tokenizer import BareTokenizer


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
        """The deltas that these ids add."""
        for token_id in ids:
            text = self._text.add(token_id)
            self._held.append((token_id, len(text)))
            self._held_text += text
        return self._answer.feed(self._safe())

    def finish(self, answer: ParsedAnswer) -> list[Delta]:
        """The part of the final answer that was not sent yet."""
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
