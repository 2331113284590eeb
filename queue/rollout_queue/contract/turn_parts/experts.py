"""The experts that an engine chose for the tokens of a turn, in a mixture of experts.

    prompt and output of a turn     a b c d e f g h
    rows, if b begins the turn      a b c d e f g        the last token passed through no expert

Each row belongs to a token, and so to the prediction of the token after it.
"""

from typing import Self

import msgspec

from rollout_queue.contract.errors import InvalidRecord


class RoutedExperts(msgspec.Struct, frozen=True, gc=False):
    """The experts of consecutive tokens. The last row belongs to the token before the turn's last one."""

    width: int
    """How many experts one token passed through: those of the first layer, then those of the next ones."""
    item_bytes: int
    """1 or 2: the bytes of one expert's number, little-endian."""
    packed: bytes

    @property
    def rows(self) -> int:
        return len(self.packed) // (self.width * self.item_bytes)

    def __post_init__(self) -> None:
        if self.item_bytes not in (1, 2) or self.width < 1:
            raise InvalidRecord(f"routed experts of {self.width} times {self.item_bytes} bytes")
        if len(self.packed) % (self.width * self.item_bytes):
            raise InvalidRecord("routed experts that are no whole number of rows")

    @classmethod
    def of_int32(cls, numbers: bytes, rows: int) -> Self:
        """Packs little-endian int32 of `rows` tokens. Raises ValueError if they are no numbers of experts."""
        width, rest = divmod(len(numbers) // 4, rows) if rows > 0 else (0, 0)
        if not width or rest or len(numbers) % 4:
            raise ValueError(f"{len(numbers)} bytes of experts for {rows} tokens")
        low, second = numbers[0::4], numbers[1::4]
        if numbers[2::4].strip(b"\0") or numbers[3::4].strip(b"\0"):
            raise ValueError("the number of an expert is negative, or above 65535")
        if not second.strip(b"\0"):
            return cls(width, 1, low)
        packed = bytearray(2 * len(low))
        packed[0::2], packed[1::2] = low, second
        return cls(width, 2, bytes(packed))

    def last(self, rows: int) -> Self:
        """The last rows of these."""
        row_bytes = self.width * self.item_bytes
        return type(self)(self.width, self.item_bytes, self.packed[max(0, self.rows - rows) * row_bytes :])
