"""Turns token ids into text that can be streamed: text is sent only once no later token can change it.

token ids ──IncrementalDetokenizer──▶ whole characters ──StreamedText──▶ text that is safe to send

Incomplete characters, the possible beginning of a stop string or of a tag, and trailing space are held back.
"""

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so the most tokens that one character can span."""


class IncrementalDetokenizer:
    """Decodes ids step by step; the texts of all steps add up to the decoding of all ids at once."""

    def __init__(self, backend: Tokenizer, byte_ids: frozenset[int]) -> None:
        self._backend = backend
        self._byte_ids = byte_ids
        # A byte-level token decodes to the same bytes everywhere; others may differ at the start of a text.
        self._needs_context = not isinstance(backend.decoder, decoders.ByteLevel)
        self._context: list[int] = []
        self._context_length = 0
        self.held: list[int] = []
        """Ids whose text may still change."""

    def step(self, ids: list[int]) -> str:
        """The text that these ids complete."""
        self.held = held = self.held + ids
        if not held or held[-1] in self._byte_ids:
            return ""  # whether a run of byte tokens is valid UTF-8 is known at its end
        text = self._decode(held)
        if not text.endswith(REPLACEMENT):
            return self._release(text, len(held))
        for count in range(1, min(LONGEST_CHARACTER, len(held) - 1) + 1):
            head, tail = self._decode(held[:-count]), self._backend.decode(held[-count:], False)
            if head + tail == text:  # no character spans the cut
                return self._release(head, len(held) - count)
        return ""

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(self._context + ids, False)[self._context_length :]

    def _release(self, text: str, count: int) -> str:
        if self._needs_context:
            self._context = self.held[count - 1 : count]
            self._context_length = len(self._backend.decode(self._context, False))
        self.held = self.held[count:]
        return text


class StreamedText:
    """One text of an answer, content or reasoning: what was sent to the client, and what is held back."""

    def __init__(
        self,
        ends: tuple[str, ...],
        tags: tuple[str, ...] = (),
        deferred_prefix: str = "",
        *,
        keep_leading_space: bool = False,
    ) -> None:
        self._ends = ends
        """If one of these appears, the text from there on is sent only at the end of the answer."""
        self._tags = tags
        """Strings that the parser may remove from the text, such as `<think>`."""
        self._deferred_prefix = deferred_prefix
        """A text that begins with this is sent only at the end of the answer."""
        self._keep_leading_space = keep_leading_space
        self._sent: list[str] = []
        self._held = ""
        self._ended = False
        self._broken_character = False
        """The text broke off in what may be a character. The rest of the character may follow after a tool
        call, so only the whole answer tells which character it is."""

    @property
    def sent(self) -> str:
        return "".join(self._sent)

    def add(self, text: str) -> bool:
        """Append text, held back until `release`. Returns whether it completes a tag."""
        self._ended = self._ended or self._broken_character
        if self._ended:
            return False
        before = len(self._held)
        self._held += text
        return any(self._held.find(tag, max(0, before - len(tag) + 1)) >= 0 for tag in self._tags)

    def end_at(self, end: str) -> None:
        """From now on, hold back the text from `end` on."""
        if end not in self._ends:
            self._ends = (*self._ends, end)

    def restart(self, whole: str) -> bool:
        """Set the text so far to `whole`. If it contradicts the sent text, do nothing and return False."""
        whole, sent = self._begin(whole), self.sent
        if not whole.startswith(sent):
            return False
        self._held, self._ended = whole[len(sent) :], False
        self._broken_character = self._held.rstrip().endswith(REPLACEMENT)
        return True

    def release(self) -> str:
        """The part of the held text that can be sent now; it counts as sent."""
        text = self._held if self._sent else self._begin(self._held)
        safe = _without_open_end(text[: self._safe_length(text)])
        self._held = text[len(safe) :]
        if safe:
            self._sent.append(safe)
        return safe

    def rest(self, whole: str) -> str:
        """The part of the final text that was not sent yet; empty if `whole` contradicts the sent text."""
        return self._held if self.restart(whole) else ""

    def _begin(self, text: str) -> str:
        return text if self._keep_leading_space else text.lstrip()

    def _safe_length(self, text: str) -> int:
        if self._deferred_prefix and not self._sent and text.startswith(self._deferred_prefix):
            self._ended = True
            return 0
        for end in self._ends:
            at = text.find(end)
            if at >= 0:
                self._ended, text = True, text[:at]
        return min((start_of_partial(text, tag) for tag in self._ends + self._tags), default=len(text))


def start_of_partial(text: str, tag: str) -> int:
    """The position from which on `text` is a beginning of `tag`; the length of `text` if there is none."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at >= 0 and not tag.startswith(text[at:]):
        at = text.find(tag[0], at + 1)
    return len(text) if at < 0 else at


def _without_open_end(text: str) -> str:
    """The text without trailing space and replacement characters, which may be parts of one character."""
    text = text.rstrip()
    while text.endswith(REPLACEMENT):
        text = text.rstrip(REPLACEMENT).rstrip()
    return text
