"""The images of the stream in memory: their bytes once, as long as a session shows them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn


@dataclass(kw_only=True)
class MemoryImages:
    """The part of `MemoryStream` that has the images."""

    pngs: dict[str, bytes] = field(default_factory=dict)
    """By hash."""

    async def images(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        return self.image_bytes(hashes)

    def image_bytes(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        return {sha256: self.pngs[sha256] for sha256 in hashes if sha256 in self.pngs}

    def keep_images(self, turn: Turn, images: Mapping[str, bytes]) -> None:
        """Store the bytes of the turn's images."""
        for image in turn.images:
            if image.sha256 in images:
                self.pngs.setdefault(image.sha256, images[image.sha256])

    def drop_images(self, heads: Iterable[SessionHead]) -> None:
        """Drop the images that none of these sessions shows."""
        shown = {image.sha256 for head in heads for turn in head.turns for image in turn.images}
        self.pngs = {sha256: png for sha256, png in self.pngs.items() if sha256 in shown}
