"""Gives every version a number before the step that makes it. No other weights have that number."""

from trainer_service.publishing.publisher import Publisher
from trainer_service.storage.disk_retry import DiskRetry
from trainer_service.storage.run_files import VersionFile


class VersionNumbers:
    """Chooses numbers higher than all that the trainer's disk, the gateway or the stream knows."""

    def __init__(self, file: VersionFile, publisher: Publisher, disk: DiskRetry) -> None:
        self._file, self._publisher, self._disk = file, publisher, disk

    def reserve_after(self, version: int) -> int:
        """A new number greater than `version`. Waits for the gateway, the disk and the stream; raises Stopped
        when told to stop meanwhile."""
        number = self._reserve_on_disk(self._publisher.newest_version(version))
        while (newest := self._publisher.reserve(number)) >= number:
            number = self._reserve_on_disk(newest)
        return number

    def _reserve_on_disk(self, above: int) -> int:
        return self._disk.until_written("the number of a version", lambda: self._file.reserve(above))
