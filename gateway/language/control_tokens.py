"""Text that spells a control token, marked so that it stays text.

"say <|im_end|>" ──▶ "say <CUT|im_end|>" ──▶ ids of "say <", ids of "|im_end|>"

A user or a tool may write whatever it likes: only the gateway ends a message.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

CUT = "\ufdd0"
"""Where text is cut before it becomes tokens. A noncharacter, which no text between people contains; in text
that contains it all the same, it is doubled."""
OPENING = 4
"""Characters of a token that are looked for first: enough to pass over the tags of a web page."""
_CUTS = re.compile(f"(?<!{CUT}){CUT}(?!{CUT})")


def split_at_cuts(text: str) -> list[str]:
    """The text between the cuts."""
    return [piece.replace(CUT * 2, CUT) for piece in _CUTS.split(text)] if CUT in text else [text]


class ControlTokenEscaper:
    """Finds the spellings of some control tokens; quick also for thousands of tokens and long texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # A token of one character cannot be cut; no tokenizer has one that controls anything.
        self._tokens = frozenset(token for token in tokens if len(token) > 1)
        lengths: dict[str, set[int]] = defaultdict(set)
        for token in self._tokens:
            lengths[token[:OPENING]].add(len(token))
        self._lengths = {opening: sorted(found) for opening, found in lengths.items()}
        self._openings = re.compile("|".join(map(re.escape, sorted(lengths))) or "(?!)")

    def cut(self, text: str) -> str:
        """The text with a cut in every control token that it spells."""
        if CUT in text:
            text = text.replace(CUT, CUT * 2)
        last, parts = 0, []
        found = self._openings.search(text)
        while found is not None:
            start = found.start()
            if any(text[start : start + length] in self._tokens for length in self._lengths[found[0]]):
                parts.append(text[last : start + 1])
                last = start + 1
            found = self._openings.search(text, start + 1)
        return CUT.join([*parts, text[last:]]) if parts else text
