"""Files in shared memory that a killed engine leaves: noted while it runs, removed after its end.

SGLang's schedulers tell their loads in a file in /dev/shm. An engine that is killed cannot remove it, and
the memory that it takes would be lost until the machine restarts. The names are noted in a file beside the
log, so that a rollout server which was killed together with its engine removes them when it starts again.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED, PREFIX = "/dev/shm/", "sglang_loads_"  # noqa: S108 - SGLang's own names
PROC = Path("/proc")


class LeftMemory:
    """The shared files of one engine, over all of its starts."""

    def __init__(self, note: Path) -> None:
        """`note` is the file that keeps their names."""
        self._note = note

    def note(self, group: int) -> None:
        """Note the files that the processes of this group have open, as far as they can be read."""
        with contextlib.suppress(OSError):
            found = {*self._noted(), *_open_in_group(group)}
            if found - {*self._noted()}:
                self._note.write_text("\n".join(sorted(found)) + "\n", encoding="utf-8")

    def remove(self) -> None:
        """Remove the noted files; no process of the engine may run any more."""
        for name in self._noted():
            with contextlib.suppress(OSError):
                Path(name).unlink()
                logger.info("removed %s, which an engine had left", name)
        with contextlib.suppress(OSError):
            self._note.unlink(missing_ok=True)

    def _noted(self) -> list[str]:
        try:
            lines = self._note.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        return [line for line in lines if _is_ours(line)]


def _is_ours(name: str) -> bool:
    return name.startswith(f"{SHARED}{PREFIX}") and "/" not in name.removeprefix(SHARED)


def _open_in_group(group: int) -> Iterator[str]:
    """The files of SGLang's loads that processes of the group have mapped or opened."""
    for process in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            for line in (process / "maps").read_text().splitlines():
                name = line.partition("/")[1] + line.partition("/")[2]
                if _is_ours(name):
                    yield name
            for link in (process / "fd").iterdir():
                name = str(link.readlink())
                if _is_ours(name):
                    yield name
