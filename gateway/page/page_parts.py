"""Builds what the page's routes share, and closes it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import msgspec

from gateway.edge.one_line import one_line
from gateway.edge.request import BodyBudget
from gateway.page.files import page_files
from gateway.page.live import LiveFeed
from gateway.page.page_access import PageDoor
from gateway.page.page_sessions import PageSessions
from gateway.parts import GatewayParts
from gateway.rest.admin.deployment import system_status
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.browsers import public_hosts
from rollout_queue.http.workers.siblings import Siblings

SIGN_IN_BYTES = 4096
"""The largest body of a sign-in. Nobody has shown a key yet, so all such bodies together are bounded, too."""


@dataclass(frozen=True)
class PageParts:
    """Open while the application runs."""

    door: PageDoor
    feed: LiveFeed
    bodies: BodyBudget


@asynccontextmanager
async def opened_page(gateway: GatewayParts, siblings: Siblings) -> AsyncIterator[PageParts | None]:
    """The page's parts; None if the settings turn the page off."""
    settings = gateway.settings.page
    if not settings.enabled:
        yield None
        return
    page_files()  # from now on the files are in memory
    hosts = public_hosts(gateway.settings.public_url)
    door = PageDoor(PageSessions(gateway.redis, settings), gateway.identities, hosts)
    feed = LiveFeed(picture_of(gateway, siblings), settings.every_s, settings.viewers)
    bodies = BodyBudget(SIGN_IN_BYTES, 256 * SIGN_IN_BYTES, 256 * SIGN_IN_BYTES)
    try:
        yield PageParts(door, feed, bodies)
    finally:
        await feed.aclose()


def picture_of(gateway: GatewayParts, siblings: Siblings) -> Callable[[], Awaitable[bytes]]:
    """The function that makes the event of one picture: the answers of two routes, and the page's version."""

    async def picture() -> bytes:
        try:
            status = await system_status(gateway, siblings)
            pipeline = asdict(await gateway.pipeline.report())
        except StorageUnavailable as error:
            return event("trouble", {"message": str(error)})
        shown = status.model_dump(mode="json", exclude_unset=True)
        return event("picture", {"status": shown, "pipeline": pipeline, "page": page_files().version})

    return picture


def event(name: str, data: object) -> bytes:
    """A server-sent event. JSON has no line ends, so a text in it cannot begin another event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), one_line(msgspec.json.encode(data)))
