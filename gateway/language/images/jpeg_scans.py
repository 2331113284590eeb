"""Counts the scans of a JPEG, each of which costs a pass over the whole picture.

A scan may have ten bytes: a file of a few megabytes would keep a decoder busy for hours.
"""

import re

MOST_SCANS = 64
"""Encoders write up to 18: those of Pillow for CMYK. A scan of 2²⁵ pixels takes most of a second."""
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""What is between markers has no other 0xff. Those of restarts, d0 to d7, belong to a scan's data."""
SCAN, END = 0xDA, 0xD9
WITH_LENGTH = frozenset({*range(0xC0, 0xD0), *range(0xDA, 0xDE), *range(0xE0, 0xF0), 0xFE})
"""Markers that a segment follows, which begins with its own length. Its bytes may look like markers: that of
a preview has scans of its own."""


def has_too_many_scans(data: bytes) -> bool:
    """Whether the first picture of a JPEG has more than `MOST_SCANS`."""
    scans, found = 0, MARKER.search(data)
    while found is not None and data[found.end() - 1] != END and scans <= MOST_SCANS:
        marker, end = data[found.end() - 1], found.end()
        scans += marker == SCAN
        if marker in WITH_LENGTH:
            end += int.from_bytes(data[end : end + 2])
        found = MARKER.search(data, end)
    return scans > MOST_SCANS
