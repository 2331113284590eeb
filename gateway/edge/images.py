"""Reads the images of a call before its session is found, since they tell conversations apart, too.

The limits are checked before, and so is a session that the call names.
"""

import msgspec

from gateway.edge.request import HeldBody
from gateway.generations.generation import Call
from gateway.language.images.pads import image_parts
from gateway.language.images.reading import ImageReader


def has_images(call: Call) -> bool:
    return next(image_parts(call.messages), None) is not None


async def with_images(reader: ImageReader, call: Call, held: HeldBody) -> Call:
    """The call with its images decoded. Their bytes count beside the body's, and longer than those.

    Raises InvalidRequest, LimitReached, StorageUnavailable, and ApiError 413 for images that never fit.
    """
    messages, pngs = await reader.read(call.messages, held.keep)
    if not pngs:
        return call
    return msgspec.structs.replace(call, messages=messages, images=pngs)
