"""The runs whose metrics are kept beside those of this one: files of JSON lines in the folder of
`metrics_path`, and in its folders.

A run is named by its file's place there, such as `before.jsonl` or `demo/metrics.jsonl`. The name is looked
up among the files that are found, so no path is made of what a request names.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import msgspec

from trainer_service.sinks.curves import Curves
from trainer_service.sinks.json_lines import EVALUATIONS

MOST_RUNS = 100
"""The runs that are listed, those that changed last."""
MOST_ENTRIES = 2000
"""So many entries of folders are looked at."""
MOST_OPEN = 3
"""The runs whose points are kept in memory."""


class KeptRun(msgspec.Struct, frozen=True):
    """One file of metrics."""

    name: str
    size_bytes: int
    changed_at: float
    """Seconds since 1970."""


class KeptRuns:
    """Finds and reads them. Threads may share it."""

    def __init__(self, path: Path | None) -> None:
        """`path` is the file of this run, which is not among them."""
        self._path = path
        self._open: OrderedDict[str, Curves] = OrderedDict()
        self._lock = Lock()

    def listed(self) -> Sequence[KeptRun]:
        """The runs, the newest first."""
        found = [KeptRun(name, *_facts(path)) for name, path in self._files()]
        return sorted(found, key=lambda each: -each.changed_at)[:MOST_RUNS]

    def curves(self, name: str) -> Curves | None:
        """Those of the run of this name; None if there is none."""
        path = next((path for known, path in self._files() if known == name), None)
        if path is None:
            return None
        with self._lock:
            curves = self._open.pop(name, None) or Curves(path)
            self._open[name] = curves
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
            return curves

    def _files(self) -> Iterator[tuple[str, Path]]:
        if self._path is None:
            return
        root, looked = self._path.parent, 0
        folders = [root]
        while folders and looked < MOST_ENTRIES:
            folder = folders.pop(0)
            with suppress(OSError):  # another process may remove it meanwhile
                for each in sorted(folder.iterdir()):
                    looked += 1
                    if each.is_symlink() or looked > MOST_ENTRIES:
                        continue
                    if each.is_dir() and folder == root:
                        folders.append(each)
                    elif each.suffix == ".jsonl" and each != self._path and self._is_run(each):
                        name = str(each.relative_to(root))
                        if name.isprintable():
                            yield name, each

    def _is_run(self, path: Path) -> bool:
        """Whether the file begins with the metrics of a step."""
        if path.stem.endswith(EVALUATIONS):
            return False
        with suppress(OSError), path.open("rb") as file:
            return file.read(1).startswith(b"{") and b'"step"' in file.read(4096)
        return False


def _facts(path: Path) -> tuple[int, float]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0.0
    return found.st_size, found.st_mtime
