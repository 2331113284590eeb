"""Answers without any markup, read without the renderer's parser, the dearest step of a short one."""

from collections.abc import Sequence

from gateway.language.partial_parse import PartialParser, markup_of
from gateway.language.render import ChatRenderer, ParsedAnswer
from rollout_queue.contract.tokens import TokenIds

OPENINGS = 256
LONGEST_OPENING = 16
"""Tokens from a prompt's last control token to its end: `<|im_start|>assistant\\n` and the like."""


class FastParser:
    """Says what an answer says where that is its text and nothing else."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._markup = markup_of(renderer)
        self._stop_ids = frozenset(renderer.stop_ids)
        self._opens_content: dict[tuple[int, ...], bool] = {}
        """By how a prompt ends: whether its answer begins with content, not inside of a thought. A template
        has few such ends; where it has many, they hold text of users, and are not worth remembering."""

    def read(self, ids: Sequence[int], prompt_ids: TokenIds) -> ParsedAnswer | None:
        """The answer; None where only the parser knows."""
        said = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        if not self._markup.control_ids.isdisjoint(said) or not self._begins_with_content(prompt_ids):
            return None
        text = self._renderer.text_of(said).strip()
        if self._markup.bare_calls and text.startswith("{"):
            return None
        if any(mark in text for mark in self._markup.marks + self._markup.ends):
            return None
        return ParsedAnswer(text)

    def _begins_with_content(self, prompt_ids: TokenIds) -> bool:
        tail = prompt_ids[-LONGEST_OPENING:].tolist()
        control = self._markup.control_ids
        start = next((at for at in range(len(tail) - 1, -1, -1) if tail[at] in control), None)
        if start is None:
            return False
        opening = tuple(tail[start:])
        known = self._opens_content.get(opening)
        if known is None:
            reading = PartialParser(self._renderer, None, "", prompt_ids).read(())
            known = reading.region == "content" and not reading.reasoning
            if len(self._opens_content) < OPENINGS:
                self._opens_content[opening] = known
        return known
