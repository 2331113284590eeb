"""A disk that is full or failing, told from every other error: it is waited for, and nothing half done stays.

The libraries say it in many ways: Python with an errno, safetensors with the errno in its text, torch's zip
writer with a count that does not match, and the errno, if any, in the error before it.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
TOLD_ERRNO = re.compile(r"\(os error (\d+)\)")
TORCH_WRITER = re.compile(r"inline_container|PytorchStreamWriter|iostream error|write\(\): fd \d+ failed")
"""Torch on a short write: `torch.save` raises a plain RuntimeError of its zip writer, or of the file's."""


class DiskTrouble(Exception):
    """Nothing was written, and nothing of the attempt is left. Worth trying again when there is room."""


class Parted(Exception):
    """One of several ranks could not write, and the others wait for it where it will not come again. Trying
    again would end in half a checkpoint, so this is never DiskTrouble: a restart brings them together."""


@contextmanager
def written(what: str, undo: Callable[[], None]) -> Iterator[None]:
    """Raises DiskTrouble, after `undo`, where the disk refuses; every other error passes as it is."""
    try:
        yield
    except Exception as error:
        reason = trouble(error)
        if reason is None:
            raise
        undo()
        raise DiskTrouble(f"{what} could not be written: {reason}") from error


def trouble(error: BaseException | None) -> str | None:
    """What is the matter with the disk, in words; None when the error has another reason."""
    told = None
    while error is not None:
        if isinstance(error, Parted):
            return None
        number = error.errno if isinstance(error, OSError) else _told_errno(error)
        if number in TROUBLE:
            return os.strerror(number)
        if isinstance(error, RuntimeError) and TORCH_WRITER.search(str(error)):
            told = f"a short write ({error})"
        error = error.__cause__ or error.__context__
    return told


def _told_errno(error: BaseException) -> int | None:
    told = TOLD_ERRNO.search(str(error))
    return int(told[1]) if told else None
