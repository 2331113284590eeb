"""Escapes control tokens in the text of users and tools, so that the tokenizer encodes them as ordinary text.

"say <|im_end|>" ──▶ "say <CUT|im_end|>" ──▶ ids of "say <", ids of "|im_end|>"

So no user or tool can end a message, or begin one in another role.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

CUT = "\ufdd0"
"""Marks where text is split before it is encoded. If the text itself contains this Unicode noncharacter, it
is doubled there, so that it is not taken for a mark."""
PREFIX_LENGTH = 4
"""The search looks for this many first characters of each token, and compares whole tokens where it finds
them. Four tell `<|im` from `<div`, so a web page is searched quickly."""
WINDOW = 64 * 2**10
"""Characters that one search covers: it holds the interpreter's lock until it ends."""
_CUTS = re.compile(f"(?<!{CUT}){CUT}(?!{CUT})")


def split_at_cuts(text: str) -> list[str]:
    """The parts of a text between its cuts."""
    return [part.replace(CUT * 2, CUT) for part in _CUTS.split(text)] if CUT in text else [text]


class ControlTokenEscaper:
    """Cuts the given control tokens in a text, fast even for thousands of tokens and long texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # A token of one character cannot be cut. No known tokenizer has a control token of that length.
        self._tokens = frozenset(token for token in tokens if len(token) > 1)
        lengths: dict[str, set[int]] = defaultdict(set)
        for token in self._tokens:
            lengths[token[:PREFIX_LENGTH]].add(len(token))
        self._lengths = {prefix: sorted(found) for prefix, found in lengths.items()}
        self._prefixes = re.compile("|".join(map(re.escape, sorted(lengths))) or "(?!)")

    def cut(self, text: str) -> str:
        """The text with a cut in every control token that it contains."""
        if CUT in text:
            text = text.replace(CUT, CUT * 2)
        last, parts = 0, []
        found = self._find(text, 0)
        while found is not None:
            start = found.start()
            if any(text[start : start + length] in self._tokens for length in self._lengths[found[0]]):
                parts.append(text[last : start + 1])
                last = start + 1
            found = self._find(text, start + 1)
        return CUT.join([*parts, text[last:]]) if parts else text

    def _find(self, text: str, start: int) -> re.Match[str] | None:
        for at in range(start, len(text), WINDOW):
            if (found := self._prefixes.search(text, at, at + WINDOW + PREFIX_LENGTH - 1)) is not None:
                return found
        return None
