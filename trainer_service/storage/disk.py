"""Recognises errors of a disk that is full or failing.

Libraries report them in different ways: Python with an errno; safetensors with the errno in its message;
torch's zip writer with a message about a short write, and perhaps an errno in the error's cause.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
TOLD_ERRNO = re.compile(r"\(os error (\d+)\)")
TORCH_WRITER = re.compile(r"inline_container|PytorchStreamWriter|iostream error|write\(\): fd \d+ failed")
"""Messages of the RuntimeError that `torch.save` raises after a short write."""


class DiskTrouble(Exception):
    """The disk refused a write, and the attempt left no files. The write can be repeated later."""


@contextmanager
def written(what: str, undo: Callable[[], None]) -> Iterator[None]:
    """If the disk refuses a write inside the block, calls `undo` and raises DiskTrouble. Every other error
    passes unchanged."""
    try:
        yield
    except Exception as error:
        reason = trouble(error)
        if reason is None:
            raise
        undo()
        raise DiskTrouble(f"{what} could not be written: {reason}") from error


def trouble(error: BaseException | None) -> str | None:
    """What is wrong with the disk, in words; None if the error has another cause."""
    short_write = None
    while error is not None:
        number = error.errno if isinstance(error, OSError) else _told_errno(error)
        if number in TROUBLE:
            return os.strerror(number)
        if isinstance(error, RuntimeError) and TORCH_WRITER.search(str(error)):
            short_write = f"a short write ({error})"
        error = error.__cause__ or error.__context__
    return short_write


def _told_errno(error: BaseException) -> int | None:
    told = TOLD_ERRNO.search(str(error))
    return int(told[1]) if told else None
