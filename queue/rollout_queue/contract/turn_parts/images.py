"""The images that a turn's context shows, and where they lie among its tokens.

    context_ids of a turn    user, look, start, pad, pad, pad, pad, end, …
    the image's span                            [3,            7)

The bytes lie once in the store, by their hash (`StreamWriter.append_turn`).
"""

import re

import msgspec

from rollout_queue.contract.errors import InvalidRecord

SHA256 = re.compile("[0-9a-f]{64}")


class TurnImage(msgspec.Struct, frozen=True, gc=False):
    """One image as the engine got it: a PNG in RGB, of a size that the model's processor leaves as it is."""

    sha256: str
    """Of the PNG's bytes, in hexadecimal digits."""
    start: int
    """Its pads are the tokens [start, end) of the turn's `context_ids`."""
    end: int
    width: int
    """In pixels."""
    height: int
    grid: tuple[int, int, int]
    """Patches in time, height and width; several patches make one token."""

    def __post_init__(self) -> None:
        sizes = (self.end - self.start, self.width, self.height, *self.grid)
        if not SHA256.fullmatch(self.sha256) or self.start < 0 or min(sizes) < 1:
            raise InvalidRecord(f"the image {self.sha256[:64]} at [{self.start}, {self.end}) is malformed")

    def moved(self, tokens: int) -> "TurnImage":
        """The image in a sequence that has so many more tokens before it."""
        return msgspec.structs.replace(self, start=self.start + tokens, end=self.end + tokens)


def check_places(images: tuple[TurnImage, ...], tokens: int) -> None:
    """Raises InvalidRecord if images overlap, or do not lie within so many tokens in their order."""
    end = 0
    for image in images:
        if image.start < end or image.end > tokens:
            raise InvalidRecord(f"image {image.sha256} does not lie in its turn's context")
        end = image.end
