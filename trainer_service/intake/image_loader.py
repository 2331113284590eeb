"""Loads the bytes of the images that rows show, just before the rows are trained."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.stream import StreamReader
from trainer_service.rows.images import ShownRows, lacking
from trainer_service.rows.rows import Row
from trainer_service.status.heartbeat import Heartbeat


class ImageLoader:
    """Reads images from the stream's store. Waits while Redis does not answer; raises Stopped if the trainer
    is told to stop meanwhile."""

    def __init__(self, stream: StreamReader, heartbeat: Heartbeat) -> None:
        self._stream, self._heartbeat = stream, heartbeat

    def load(self, rows: Sequence[Row]) -> ShownRows[Row]:
        """The rows with the bytes of their images. Sessions whose images are gone are refused."""
        wanted = sorted({image.place.sha256 for row in rows for image in row.images})
        if not wanted:
            return ShownRows(list(rows), {})
        found = self._heartbeat.retry(
            lambda: self._stream.image_bytes(wanted), StorageUnavailable, "waiting", "images in Redis"
        )
        pngs = {name: png for name, png in found.items() if sha256(png).hexdigest() == name}
        refused = {row.session_id: why for row in rows if (why := lacking(row.images, pngs)) is not None}
        shown = [
            replace(row, images=tuple(replace(each, png=pngs[each.place.sha256]) for each in row.images))
            for row in rows
            if row.session_id not in refused
        ]
        return ShownRows(shown, refused)
