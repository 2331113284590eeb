"""Reads the images of a call before its session is found, since they tell conversations apart, too."""

import msgspec

from gateway.edge.request import HeldBody
from gateway.generations.generation import Call
from gateway.language.images.reading import ImageReader


async def with_images(reader: ImageReader, call: Call, held: HeldBody) -> Call:
    """The call with its images decoded; their bytes count as the body's do. Raises InvalidRequest,
    LimitReached, StorageUnavailable."""
    messages, pngs = await reader.read(call.messages)
    if not pngs:
        return call
    held.count(sum(map(len, pngs.values())))
    return msgspec.structs.replace(call, messages=messages, images=pngs)
