"""Colours: say which colour an image has."""

import base64
import io
from collections.abc import Iterator
from random import Random
from typing import Any

from PIL import Image

COLOURS = {"red": (200, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 200), "yellow": (220, 200, 40)}
SIDE = 64
SPREAD = 30
"""How much each channel of a task's colour differs at most from that of its name."""


class Colours:
    """With `shown=False` every image is grey, so nothing can be learned but to guess."""

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown

    def tasks(self, seed: int) -> Iterator[dict[str, Any]]:
        draw = Random(seed)
        while True:
            name = draw.choice([*COLOURS])
            yield {"name": name, "rgb": [near + draw.randint(-SPREAD, SPREAD) for near in COLOURS[name]]}

    def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        self._name = task["name"]
        image = image_of(tuple(task["rgb"]) if self._shown else (128, 128, 128))
        return {"role": "user", "content": [{"type": "text", "text": "colour?"}, image]}

    def step(self, answer: str) -> tuple[None, float, bool, bool, dict[str, float]]:
        return None, float(answer.strip() == self._name), True, False, {}


def image_of(rgb: tuple[int, ...]) -> dict[str, Any]:
    """A part of a message: a square of one colour."""
    written = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), rgb).save(written, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
