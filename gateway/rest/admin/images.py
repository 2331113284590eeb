"""`GET /admin/images/{sha256}`: an image that recorded turns show, as the engine got it."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.errors import ObjectNotFound
from gateway.parts import parts_of

router = APIRouter(prefix="/images")


@router.get(
    "/{sha256}",
    response_class=Response,
    responses={200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def image(sha256: str, request: Request) -> Response:
    """The PNG with this hash, which the turns of `GET /admin/export` name."""
    png = (await parts_of(request).writer.images([sha256])).get(sha256)
    if png is None:
        raise ObjectNotFound(f"no turn shows an image {sha256[:64]!r}")
    return Response(png, media_type="image/png", headers={"cache-control": "private, max-age=3600"})
