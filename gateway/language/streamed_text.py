"""Text as far as no later token can change it: half a character, the beginning of a stop string, space wait.

token ids ──IncrementalDetokenizer──▶ whole characters ──StreamedText──▶ what a client may read already
"""

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so the most tokens that one can be spread over."""


class IncrementalDetokenizer:
    """Ids to text piece by piece; the pieces add up to the decoding of all ids at once."""

    def __init__(self, backend: Tokenizer, byte_ids: frozenset[int]) -> None:
        self._backend = backend
        self._byte_ids = byte_ids
        # Byte-level tokens are their bytes, wherever they stand; others may read differently at the start.
        self._looks_back = not isinstance(backend.decoder, decoders.ByteLevel)
        self._before: list[int] = []
        self._before_length = 0
        self.held: list[int] = []
        """Ids whose text is not certain yet."""

    def step(self, ids: list[int]) -> str:
        """The text that these ids make certain."""
        self.held = held = self.held + ids
        if not held or held[-1] in self._byte_ids:
            return ""  # a run of byte tokens is valid or not as a whole
        text = self._decode(held)
        if not text.endswith(REPLACEMENT):
            return self._release(text, len(held))
        for count in range(1, min(LONGEST_CHARACTER, len(held) - 1) + 1):
            head, tail = self._decode(held[:-count]), self._backend.decode(held[-count:], False)
            if head + tail == text:  # no character lies across the cut
                return self._release(head, len(held) - count)
        return ""

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(self._before + ids, False)[self._before_length :]

    def _release(self, text: str, count: int) -> str:
        if self._looks_back:
            self._before = self.held[count - 1 : count]
            self._before_length = len(self._backend.decode(self._before, False))
        self.held = self.held[count:]
        return text


class StreamedText:
    """One text of an answer on its way to a client: what was sent, and what waits behind it."""

    def __init__(
        self,
        ends: tuple[str, ...],
        marks: tuple[str, ...] = (),
        opening: str = "",
        *,
        as_it_is: bool = False,
    ) -> None:
        self._ends = ends
        """Nothing from one of these on is sent before the answer's end."""
        self._marks = marks
        """These may turn out to be no text at all."""
        self._opening = opening
        """A text that begins with this is sent at the answer's end."""
        self._as_it_is = as_it_is
        """Space at the start belongs to the text."""
        self._sent: list[str] = []
        self._waiting = ""
        self._ended = False
        self._torn = False
        """Whether the text broke off within what may be a character: its other part may come behind a tool
        call, and only the answer's end knows what both are."""

    @property
    def sent(self) -> str:
        return "".join(self._sent)

    def add(self, text: str) -> bool:
        """Let text wait. True when a mark is complete with it."""
        self._ended = self._ended or self._torn
        if self._ended:
            return False
        before = len(self._waiting)
        self._waiting += text
        return any(self._waiting.find(mark, max(0, before - len(mark) + 1)) >= 0 for mark in self._marks)

    def end_at(self, end: str) -> None:
        """From now on nothing from `end` on is certain."""
        if end not in self._ends:
            self._ends = (*self._ends, end)

    def restart(self, whole: str) -> bool:
        """All the text so far is `whole`. False when that is not what was sent, and nothing is changed."""
        whole, sent = self._begin(whole), self.sent
        if not whole.startswith(sent):
            return False
        self._waiting, self._ended = whole[len(sent) :], False
        self._torn = self._waiting.rstrip().endswith(REPLACEMENT)
        return True

    def release(self) -> str:
        """What is certain of the waiting text; it counts as sent."""
        text = self._waiting if self._sent else self._begin(self._waiting)
        end = self._end_of(text)
        certain = _settled(text[:end])
        self._waiting = text[len(certain) :]
        if certain:
            self._sent.append(certain)
        return certain

    def rest(self, whole: str) -> str:
        """What the client still misses of the final text."""
        return self._waiting if self.restart(whole) else ""

    def _begin(self, text: str) -> str:
        return text if self._as_it_is else text.lstrip()

    def _end_of(self, text: str) -> int:
        if self._opening and not self._sent and text.startswith(self._opening):
            self._ended = True
            return 0
        for end in self._ends:
            at = text.find(end)
            if at >= 0:
                self._ended, text = True, text[:at]
        return min((_begun(text, mark) for mark in self._ends + self._marks), default=len(text))


def _begun(text: str, mark: str) -> int:
    """Where the end of `text` begins `mark`; the length of `text` where it does not."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) if at < 0 else at


def _settled(text: str) -> str:
    """Without space at its end, and without what may be a part of a character."""
    text = text.rstrip()
    while text.endswith(REPLACEMENT):
        text = text.rstrip(REPLACEMENT).rstrip()
    return text
