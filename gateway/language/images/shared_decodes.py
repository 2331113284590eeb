"""Decodes an image once for all calls that show it at the same time, such as the sessions of a group."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.language.images.decoding import Png


@dataclass(eq=False)
class Decode:
    """One decode, and how many calls wait for it."""

    made: asyncio.Future[Png]
    waiting: int = 0

    @property
    def failed(self) -> bool:
        """Whether it has ended without an image."""
        return self.made.cancelled() or self.made.exception() is not None


class SharedDecodes:
    """The decodes in progress, by the digest of the client's bytes."""

    def __init__(self) -> None:
        self._running: dict[bytes, Decode] = {}

    async def png(self, digest: bytes, begin: Callable[[], asyncio.Future[Png]]) -> Png:
        """The image that a decode in progress makes of these bytes, or one that `begin` starts.

        If another call's decode fails, this call starts its own, because its bounds may be wider. Raises what
        its own raises. A decode that no call waits for any longer is cancelled.
        """
        while True:
            decode = self._running.get(digest)
            if own := decode is None:
                decode = self._running[digest] = Decode(begin())
            await self._ended(digest, decode)
            if own or not decode.failed:
                return decode.made.result()

    async def _ended(self, digest: bytes, decode: Decode) -> None:
        decode.waiting += 1
        try:
            await asyncio.wait([decode.made])
        finally:
            decode.waiting -= 1
            unneeded = decode.made.done() or not decode.waiting
            if unneeded and self._running.get(digest) is decode:
                del self._running[digest]
                decode.made.cancel()
