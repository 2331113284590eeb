"""The rule by which a model's processor turns an image into tokens, from the files beside its weights.

width, height ──size──▶ multiples of a token's side ──grid──▶ patches ──pads──▶ how many tokens

The gateway resizes images to such a size itself. Two processors resize differently, and would give the engine
and the trainer other pixels.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

import msgspec

from gateway.errors import InvalidRequest

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
