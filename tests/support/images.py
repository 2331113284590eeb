"""Images for tests: noise, so that no two are alike."""

import base64
import io
import random
from typing import Any

from PIL import Image


def image_of(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    pixels = random.Random(seed).randbytes(width * height * len(mode))
    return Image.frombytes(mode, (width, height), pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def noise_url(width: int = 64, height: int = 64, seed: int = 0) -> str:
    return data_url(encoded(image_of(width, height, seed)))


def shown(*parts: str) -> list[dict[str, Any]]:
    """The content of a chat message: data URLs become images, other texts text."""
    return [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]


def asking(*parts: str) -> dict[str, Any]:
    return {"role": "user", "content": shown(*parts)}


def opened(url: str) -> Image.Image:
    """The image of a data URL."""
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
