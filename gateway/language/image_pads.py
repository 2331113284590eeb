"""Where images lie among the ids of a prompt. An engine gets one pad for each image, a record all.

one pad each ──expanded──▶ as many pads as the image has tokens ──placed──▶ the span of each image
                                                                ──collapsed──▶ one pad each again

Vision is the rule by which a model's processor turns an image into tokens, from the files beside its weights:

width, height ──size──▶ multiples of a token's side ──grid──▶ patches ──pads──▶ how many tokens

The gateway resizes images to such a size itself. Two processors resize differently, and would give the engine
and the trainer other pixels.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gateway.errors import InvalidRequest, invalid
from rollout_queue.contract.records import TurnImage

logger = logging.getLogger(__name__)

SERVED = frozenset({"qwen3_vl", "qwen3_vl_moe"})
"""The model types whose images are served: those with this rule for which the trainer reproduces the engine's
logprobs."""
WIDEST = 200
"""The largest ratio of an image's sides that the processor takes."""


class Vision(msgspec.Struct, frozen=True):
    """How a model reads images. Sizes are in pixels."""

    image_pad: int
    """The id of the token that stands for a part of an image."""
    video_pad: int
    patch: int
    """The side of a patch."""
    merge: int
    """So many patches in height and in width make one token."""
    least_pixels: int
    most_pixels: int

    @property
    def pads(self) -> frozenset[int]:
        """The ids that only images and videos may have in a prompt: an engine looks for them."""
        return frozenset({self.image_pad, self.video_pad})

    @property
    def side(self) -> int:
        """The side of the square that becomes one token."""
        return self.patch * self.merge

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The width and height to which the processor resizes an image. It leaves an image of such a size as
        it is. Raises InvalidRequest for an image that is too narrow."""
        side = self.side
        wide, high = (max(side, round(each / side) * side) for each in (width, height))
        if wide * high > self.most_pixels:
            scale = math.sqrt(width * height / self.most_pixels)
            wide, high = (max(side, math.floor(each / scale / side) * side) for each in (width, height))
        elif wide * high < self.least_pixels:
            scale = math.sqrt(self.least_pixels / (width * height))
            wide, high = (math.ceil(each * scale / side) * side for each in (width, height))
        fits = self.least_pixels <= wide * high <= self.most_pixels
        if not fits or any(max(each) > WIDEST * min(each) for each in ((width, height), (wide, high))):
            raise InvalidRequest(f"the model reads no image of {width} by {height} pixels")
        return wide, high

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """The patches in time, height and width of an image that has been resized."""
        return 1, height // self.patch, width // self.patch

    def tokens(self, width: int, height: int) -> int:
        """How many tokens an image has that has been resized."""
        return (height // self.side) * (width // self.side)


def vision_of(model_path: Path) -> Vision | None:
    """How the model of this directory reads images; None if it does not, or if its images are not served.

    Raises SystemExit if the settings of its processor are missing or malformed.
    """
    config = _read(model_path / "config.json")
    kind = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict):
        return None
    if kind not in SERVED:
        logger.warning("images for models of type %s are not served; text is", kind)
        return None
    file = model_path / "preprocessor_config.json"
    try:
        processor = _read(file)
        size = processor.get("size") or {}
        vision = Vision(
            image_pad=int(config["image_token_id"]),
            video_pad=int(config["video_token_id"]),
            patch=int(processor["patch_size"]),
            merge=int(processor["merge_size"]),
            least_pixels=int(size.get("shortest_edge") or processor["min_pixels"]),
            most_pixels=int(size.get("longest_edge") or processor["max_pixels"]),
        )
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise SystemExit(f"{file} does not say how the model reads images: {error!r}") from error
    if min(vision.patch, vision.merge) < 1 or not vision.side**2 <= vision.least_pixels <= vision.most_pixels:
        raise SystemExit(f"{file}: {vision} allows no image")
    return vision


def _read(file: Path) -> dict[str, Any]:
    read = json.loads(file.read_bytes())
    if not isinstance(read, dict):
        raise ValueError("not an object")
    return read


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
        raise invalid(
            "messages",
            f"the prompt has {pads} tokens that stand for images or videos,"
            f" and {len(images)} images: the text of a tool may name such a token",
        )
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


class OnePadTemplate:
    """Lets a renderer of the library write one pad for each image: for more, it would need the model's
    processor."""

    def __init__(self, template: Any) -> None:
        self._template = template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._template, name)

    def render_ids(self, messages: Sequence[Any], **options: Any) -> list[int]:
        rendered: list[int] = self._template.render(messages, process_multimodal=False, **options).token_ids
        return rendered

    def bridge_to_next_turn(self, *arguments: Any, **options: Any) -> Any:
        return self._template.bridge_to_next_turn(*arguments, process_multimodal=False, **options)
