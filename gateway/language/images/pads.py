"""Where images lie among the ids of a prompt. An engine gets one pad for each image, a record all.

one pad each ──expanded──▶ as many pads as the image has tokens ──placed──▶ the span of each image
                                                                ──collapsed──▶ one pad each again
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gateway.errors import InvalidRequest
from gateway.language.images.vision import Vision
from rollout_queue.contract.turn_parts.images import TurnImage

IMAGE = "image"
"""The type of a part of a message's content that is an image. Clients write it otherwise: a part with a hash
always comes from the gateway."""


class DecodedImage(msgspec.Struct, frozen=True):
    """An image of a message, as the engine gets it."""

    sha256: str
    width: int
    height: int
    where: str = ""
    """The field of the request that has it."""

    @property
    def part(self) -> dict[str, Any]:
        """The part of a message's content that stands for it."""
        return {"type": IMAGE, "sha256": self.sha256, "width": self.width, "height": self.height}


def image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The parts that are images, in the order of the prompt."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict) and part.get("type") == IMAGE)


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[DecodedImage]:
    """The images of messages that `ImageReader` has read."""
    return [DecodedImage(part["sha256"], part["width"], part["height"]) for part in image_parts(messages)]


def has_image(content: Any) -> bool:
    return next(image_parts([{"content": content}]), None) is not None


def expanded(ids: Sequence[int], images: Sequence[DecodedImage], vision: Vision) -> list[int]:
    """The ids with all pads of each image. Raises InvalidRequest unless there is one pad for each image: an
    engine hangs or dies of any other number."""
    pads = sum(token_id in vision.pads for token_id in ids)
    if pads != len(images):
        message = (
            f"messages: the prompt has {pads} tokens that stand for images or videos,"
            f" and {len(images)} images: the text of a tool may name such a token"
        )
        raise InvalidRequest(message, param="messages")
    counts = iter([vision.tokens(image.width, image.height) for image in images])
    whole: list[int] = []
    for token_id in ids:
        whole += [token_id] * next(counts) if token_id in vision.pads else [token_id]
    return whole


def placed(ids: Sequence[int], images: Sequence[DecodedImage], vision: Vision) -> tuple[TurnImage, ...]:
    """The images with their spans among ids that `expanded` has made of them, and that have no other pads."""
    found: list[TurnImage] = []
    end = 0
    for image in images:
        start = end
        while ids[start] != vision.image_pad:
            start += 1
        end = start + vision.tokens(image.width, image.height)
        grid = vision.grid(image.width, image.height)
        found.append(TurnImage(image.sha256, start, end, image.width, image.height, grid))
    return tuple(found)


def collapsed(ids: list[int], images: Sequence[TurnImage]) -> list[int]:
    """The ids with the first pad of each image only; the same list without images."""
    if not images:
        return ids
    kept: list[int] = []
    end = 0
    for image in images:
        kept += ids[end : image.start + 1]
        end = image.end
    return [*kept, *ids[end:]]
