"""The images of rows: where they lie among the tokens, and their bytes once the row is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, NamedTuple, TypeVar

from rollout_queue.contract.records import Turn, TurnImage

Shown = TypeVar("Shown")


@dataclass(frozen=True)
class RowImage:
    """An image of a row, or of a micro-batch."""

    place: TurnImage
    """The image with its place in the row, or in the micro-batch."""
    png: bytes = b""
    """Empty until the row is trained."""

    def moved(self, tokens: int) -> "RowImage":
        return replace(self, place=self.place.moved(tokens))


class ImageRule(NamedTuple):
    """How the trained model reads images."""

    pad: int
    """The id of the token that stands for a part of an image."""
    patch: int
    """The side of a patch, in pixels."""
    merge: int
    """So many patches in height and in width make one token."""

    def complaint(self, turn: Turn) -> str | None:
        """Why the images of a turn cannot be trained; None if they can."""
        shown = 0
        for image in turn.images:
            span = turn.context_ids[image.start : image.end]
            if span.count(self.pad) != len(span) or not self._fits(image, len(span)):
                return (
                    f"turn {turn.turn_id} has an image in {len(span)} tokens that are not the model's for it"
                )
            shown += len(span)
        if turn.context_ids.count(self.pad) != shown:
            return f"turn {turn.turn_id} has tokens of images that it does not show"
        return None

    def _fits(self, image: TurnImage, tokens: int) -> bool:
        grid = (1, image.height // self.patch, image.width // self.patch)
        exact = (image.height % self.patch, image.width % self.patch) == (0, 0)
        return exact and image.grid == grid and tokens * self.merge**2 == prod(grid)


class ShownRows(NamedTuple, Generic[Shown]):
    """Rows with the bytes of their images."""

    rows: list[Shown]
    refused: Mapping[str, str]
    """The sessions whose images are not there, and why."""


def row_images(branch: Sequence[Turn]) -> tuple[RowImage, ...]:
    """The images of the row of a branch, in their order."""
    images: list[RowImage] = []
    length = 0
    for turn in branch:
        images += [RowImage(image.moved(length)) for image in turn.images]
        length += len(turn.context_ids) + len(turn.output_ids)
    return tuple(images)


def within(images: Sequence[RowImage], start: int, end: int) -> tuple[RowImage, ...]:
    """The images among the tokens [start, end), with places in this part."""
    return tuple(each.moved(-start) for each in images if start <= each.place.start < end)


def in_pack(rows: Sequence[Sequence[RowImage]], starts: Sequence[int]) -> tuple[RowImage, ...]:
    """The images of rows that begin at these places of a pack, in the order of their places there."""
    moved = [each.moved(start) for row, start in zip(rows, starts, strict=True) for each in row]
    return tuple(sorted(moved, key=lambda each: each.place.start))


def lacking(images: Sequence[RowImage], pngs: Mapping[str, bytes]) -> str | None:
    """Why these images cannot be shown; None if all bytes are there."""
    gone = next((each.place.sha256 for each in images if each.place.sha256 not in pngs), None)
    return None if gone is None else f"the image {gone} is not stored"
