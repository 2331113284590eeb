"""Reads answers that have no markup, in a small part of the time that the renderer's parser takes."""

from collections.abc import Sequence

from gateway.language.answers.partial_parse import PartialParser, markup_of
from gateway.language.parsed_answer import ParsedAnswer
from gateway.language.render import ChatRenderer
from rollout_queue.contract.tokens import TokenIds

MAX_KNOWN_ENDS = 256
LONGEST_END = 16
"""The most tokens from a prompt's last control token to its end, such as `<|im_start|>assistant\\n`."""


class FastParser:
    """Reads an answer that is plain content: no reasoning, no tool call."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._markup = markup_of(renderer)
        self._stop_ids = frozenset(renderer.stop_ids)
        self._content_first: dict[tuple[int, ...], bool] = {}
        """For each end of a prompt: whether the answer begins with content, and not inside reasoning. A
        template has few ends. If there are more than MAX_KNOWN_ENDS, they contain text of users: the first
        ones are kept, and prompts with another end are parsed each time."""

    def read(self, ids: Sequence[int], prompt_ids: TokenIds) -> ParsedAnswer | None:
        """The answer; None if the renderer's parser has to read it."""
        text_ids = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        if not self._markup.control_ids.isdisjoint(text_ids) or not self._begins_with_content(prompt_ids):
            return None
        text = self._renderer.text_of(text_ids).strip()
        if self._markup.bare_calls and text.startswith("{"):
            return None
        if any(tag in text for tag in self._markup.tags + self._markup.ends):
            return None
        return ParsedAnswer(text)

    def _begins_with_content(self, prompt_ids: TokenIds) -> bool:
        tail = prompt_ids[-LONGEST_END:].tolist()
        control = self._markup.control_ids
        start = next((at for at in range(len(tail) - 1, -1, -1) if tail[at] in control), None)
        if start is None:
            return False
        end = tuple(tail[start:])
        known = self._content_first.get(end)
        if known is None:
            parse = PartialParser(self._renderer, None, "", prompt_ids).parse(())
            known = parse.region == "content" and not parse.reasoning
            if len(self._content_first) < MAX_KNOWN_ENDS:
                self._content_first[end] = known
        return known
