"""Reads the images in requests, in the shapes of the three contracts, and refuses what is not served.

chat       {"type": "image_url", "image_url": {"url": …, "detail": …}}
Responses  {"type": "input_image", "image_url": …, "detail": …}
Messages   {"type": "image", "source": {"type": "base64", "media_type": …, "data": …}}
"""

from collections.abc import Iterable
from typing import Any

from gateway.dialects.fields import (
    IMAGE_BLOCK,
    IMAGE_PART,
    IMAGE_SOURCE,
    IMAGE_URL,
    INPUT_IMAGE,
    check_fields,
)
from gateway.dialects.wire import JsonObject
from gateway.errors import invalid
from gateway.language.image_reading import image_part

SHOWN = frozenset({"user", "tool", "function"})
"""The roles whose messages may have images."""


def is_image(part: Any, kind: str) -> bool:
    """Whether the part has the type that images have in its contract."""
    return isinstance(part, dict) and part.get("type") == kind


def joined(parts: Iterable[str | JsonObject]) -> str | list[JsonObject]:
    """Texts as one text; texts and images as the parts of a chat message."""
    given = list(parts)
    texts = [part for part in given if isinstance(part, str)]
    if len(texts) == len(given):
        return "".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in given]


def chat_image(part: JsonObject, where: str) -> JsonObject:
    """The image of a part of a chat message. Raises InvalidRequest that names a malformed field."""
    check_fields(part, IMAGE_PART, where)
    given: Any = part.get("image_url")
    if not isinstance(given, dict):
        raise invalid(f"{where}.image_url", "an object with the field url")
    check_fields(given, IMAGE_URL, f"{where}.image_url")
    return image_part(given.get("url"), f"{where}.image_url.url")


def input_image(part: JsonObject, where: str) -> JsonObject:
    """The image of a part of a Responses item. Raises InvalidRequest that names a malformed field."""
    check_fields(part, INPUT_IMAGE, where)
    return image_part(part.get("image_url"), f"{where}.image_url")


def image_block(block: JsonObject, where: str) -> JsonObject:
    """The image of a block of Anthropic's. Raises InvalidRequest that names a malformed field."""
    check_fields(block, IMAGE_BLOCK, where)
    source: Any = block.get("source")
    if not isinstance(source, dict):
        raise invalid(f"{where}.source", "not an object")
    check_fields(source, IMAGE_SOURCE, f"{where}.source")
    if source.get("type") == "url":
        return image_part(source.get("url"), f"{where}.source.url")
    media_type, data = source.get("media_type"), source.get("data")
    if source.get("type") != "base64":
        raise invalid(f"{where}.source.type", "base64 or url")
    if not isinstance(media_type, str) or not isinstance(data, str):
        raise invalid(f"{where}.source", "give media_type and data")
    return image_part(f"data:{media_type};base64,{data}", f"{where}.source.data")
