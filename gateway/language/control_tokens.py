"""Escapes control tokens in the text of users and tools, so that the tokenizer encodes them as ordinary text.

"say <|im_end|>" ──▶ "say <CUT|im_end|>" ──▶ ids of "say <", ids of "|im_end|>"

So no user or tool can end a message, or begin one in another role.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from os.path import commonprefix

from gateway.language.token_budget import BUDGET

CUT = "\ufdd0"
"""Marks where text is split before it is encoded. If the text itself contains this Unicode noncharacter, it
is doubled there, so that it is not taken for a mark."""
WINDOW = 64 * 2**10
"""Characters that are searched at once: a search holds the interpreter's lock until it ends."""
_CUTS = re.compile(f"(?<!{CUT}){CUT}(?!{CUT})")


def split_at_cuts(text: str) -> list[str]:
    """The parts of a text between its cuts."""
    return [part.replace(CUT * 2, CUT) for part in _CUTS.split(text)] if CUT in text else [text]


class ControlTokenEscaper:
    """Cuts the given control tokens in a text, fast even for thousands of tokens and long texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # A token of one character cannot be cut. No known tokenizer has a control token of that length.
        known = sorted({token for token in tokens if len(token) > 1})
        self._longest = max(map(len, known), default=1)
        rests: dict[str, list[str]] = {}
        for token in known:
            rests.setdefault(token[0], []).append(token[1:])
        begins = (f"{re.escape(first)}(?={_any_of(each)})" for first, each in rests.items())
        self._begins = re.compile("|".join(begins) or "(?!)")
        """The first character of each token, wherever one begins."""

    def cut(self, text: str) -> str:
        """The text with a cut in every control token that it contains. Raises InvalidRequest once the prompt
        has more cuts than it may have tokens: there is a token between two cuts."""
        if CUT in text:
            text = text.replace(CUT, CUT * 2)
        last, parts, budget = 0, [], BUDGET.get()
        for start in self._starts(text):
            parts.append(text[last : start + 1])
            last = start + 1
            if budget is not None:
                budget.cut()
        return CUT.join([*parts, text[last:]]) if parts else text

    def _starts(self, text: str) -> Iterator[int]:
        for at in range(0, len(text), WINDOW):
            for found in self._begins.finditer(text, at, at + WINDOW + self._longest - 1):
                if found.start() < at + WINDOW:  # the next window has the others
                    yield found.start()


def _any_of(texts: Sequence[str]) -> str:
    """A pattern of any of the texts that looks at each character once: the texts as a tree."""
    begins = sorted({text[:1] for text in texts})
    if "" in begins:
        return ""
    branches = []
    for begin in begins:
        same = [text for text in texts if text.startswith(begin)]
        shared = commonprefix(same)  # noqa: RUF071 - they are no paths
        branches.append(re.escape(shared) + _any_of([text[len(shared) :] for text in same]))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
