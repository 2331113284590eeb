"""The bytes that a token stands for, from the vocabulary: several tokens may make one character together.

"Ġwor" of a byte-level vocabulary ──▶ b" wor"        <0xE2> of a SentencePiece vocabulary ──▶ b"\\xe2"
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""The bytes that a byte-level vocabulary writes as themselves; it numbers the others from U+0100 on."""
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + number): byte
    for number, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}


class TokenBytes:
    """The bytes of the tokens of one vocabulary. Those of all tokens of a text, joined, are its UTF-8."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        kinds = _kinds(json.loads(backend.decoder.__getstate__())) if backend.decoder else ()
        self._byte_level = "ByteLevel" in kinds
        self._byte_tokens = "ByteFallback" in kinds
        pieces = ((byte, char, f"<0x{byte:02X}>") for char, byte in BYTE_OF.items())
        self._single = {
            byte: backend.token_to_id(char if self._byte_level else name) for byte, char, name in pieces
        }
        """The token of each byte; None for a byte that is no token."""
        self._anchor = backend.token_to_id("a")
        """A token of which it is known that it is in the middle of a text: some decoders drop the space with
        which a text begins."""

    def of(self, token_id: int) -> bytes:
        """The bytes of one token; none of an id that the vocabulary does not have."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            found = [BYTE_OF.get(char) for char in piece]
            return piece.encode() if None in found else bytes(byte for byte in found if byte is not None)
        if self._byte_tokens and (byte := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self._anchor is not None:
            before, both = self._decode([self._anchor]), self._decode([self._anchor, token_id])
            if both.startswith(before):
                return both[len(before) :].encode()
        return self._decode([token_id]).encode()

    def named(self, token_id: int) -> tuple[str, bytes]:
        """The text of one token, and its bytes. If these are no whole characters, the text names them."""
        data = self.of(token_id)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return named_bytes(data), data

    def ids_of(self, text: str) -> list[int] | None:
        """One token for each byte of the text; None if there are no such tokens."""
        ids = [self._single[byte] for byte in text.encode()]
        return None if None in ids else [token_id for token_id in ids if token_id is not None]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


def named_bytes(data: bytes) -> str:
    """The name of bytes that are no whole characters, as OpenAI writes it: `bytes:\\xe2\\x80`."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _kinds(decoder: dict[str, Any]) -> set[str]:
    """The types of a decoder and of its parts."""
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


class GrowingText:
    """A text whose tokens come one by one."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The characters that the token completes."""
        return self._decoder.decode(self._bytes_of(token_id))


def text_and_ends(ids: Sequence[int], bytes_of: Callable[[int], bytes]) -> tuple[str, list[int]]:
    """The text of the ids, and for each id how many characters are complete after it."""
    growing = GrowingText(bytes_of)
    added = [growing.add(token_id) for token_id in ids]
    return "".join(added), list(accumulate(map(len, added)))
