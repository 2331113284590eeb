"""Reads the files that a trainer's sinks write: JSON lines and TensorBoard's curves."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c


def events(directory: Path) -> Iterator[Any]:
    """The events that TensorBoard reads: complete records with valid checksums, ordered by file name."""
    for path in sorted(directory.iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            head = content[at : at + 8]
            (size,), (check,) = struct.unpack("<Q", head), struct.unpack("<I", content[at + 8 : at + 12])
            body = content[at + 12 : at + 12 + size]
            (body_check,) = struct.unpack("<I", content[at + 12 + size : at + 16 + size])
            assert (check, body_check) == (masked_crc32c(head), masked_crc32c(body))
            yield Event.FromString(body)
            at += 16 + size


def curve(directory: Path, tag: str) -> list[tuple[int, float]]:
    """One curve as TensorBoard draws it: the start of a new file removes earlier points at later steps."""
    points: list[tuple[int, float]] = []
    for event in events(directory):
        if event.session_log.status == SessionLog.START:
            points = [point for point in points if point[0] < event.step]
        points += [(event.step, each.simple_value) for each in event.summary.value if each.tag == tag]
    return points


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
