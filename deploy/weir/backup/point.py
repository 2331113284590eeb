"""Finds the checkpoint that was the current one at the moment that a copy of Redis shows.

Nobody tells when Redis begins to copy its data (it forks). So a thread looks at CURRENT again and again, and
writes the number of each look into Redis. The copy then has the number of one look, `n`: Redis forked after
look `n`, and before the number of look `n + 1` was written. If looks `n` and `n + 2` saw the same checkpoint,
it was the current one when Redis forked.

Each checkpoint that a look finds is held: its files get second names (hard links), so that the trainer may
remove its own at any time. Files of a checkpoint never change.
"""

import os
import secrets
import shutil
import threading
from contextvars import copy_context
from pathlib import Path

from redis import Redis

from rollout_queue import clock
from rollout_queue.redis import key_names
from trainer_service.storage.checkpoint import CURRENT, TAG
from weir.errors import StackError

MARK = key_names.Key("weir:backup_mark")
MARK_LIVES_S = 3600
LOOK_EVERY_S = 0.05
NOT_KEPT = frozenset({CURRENT, "ATTEMPT", "OUT_OF_MEMORY"})
"""Files of the trainer's process, and the one that is written last."""


class PointMissed(StackError):
    """A checkpoint was finished just when Redis copied its data."""


class FileHolder:
    """Gives files second names in a hidden directory beside them, and removes these at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / f".backup-{os.getpid()}-{secrets.token_hex(4)}"

    def hold(self, name: str, within: Path) -> Path:
        """Hold a file, or a directory with all that is in it, under the same name. Raises OSError if it is
        removed meanwhile."""
        source, target = self._directory / name, within / name
        if source.is_dir():
            shutil.copytree(source, target, copy_function=linked)
        else:
            linked(str(source), str(target))
        return target

    def release(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def linked(source: str, target: str) -> str:
    """A second name for a file, or a copy where the disk has no hard links."""
    target_path = Path(target)
    target_path.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
    return target


class CheckpointWatch:
    """Looks at CURRENT until it is stopped."""

    def __init__(self, redis: Redis, directory: Path) -> None:
        self._redis, self._directory = redis, directory
        self._holder = FileHolder(directory)
        self._looks: list[str | None] = []
        """What each look saw: the tag of a checkpoint; None before the first."""
        self._held: dict[str, Path] = {}
        self._over = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="checkpoints", daemon=True
        )

    def start(self) -> None:
        """Returns after the first look, so that each copy has a mark."""
        self._look()
        self._thread.start()

    def look_twice(self) -> None:
        """End, after two more looks."""
        self.stop()
        if self._failed is not None:
            raise self._failed
        self._look()
        self._look()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def checkpoint_at(self, mark: bytes) -> Path | None:
        """The held directory of the checkpoint that was current when Redis had this mark; None if there was
        none. Raises PointMissed."""
        look = int(mark.decode().split("-")[1])
        if look + 2 >= len(self._looks) or self._looks[look] != self._looks[look + 2]:
            raise PointMissed("the trainer finished a checkpoint just when Redis copied its data")
        tag = self._looks[look]
        return None if tag is None else self._held[tag]

    def release(self) -> None:
        self.stop()
        self._holder.release()

    def _run(self) -> None:
        while not clock.wait(self._over, LOOK_EVERY_S):
            try:
                self._look()
            except Exception as error:  # the main thread raises it
                self._failed = error
                return

    def _look(self) -> None:
        tag = current_tag(self._directory)
        if tag is not None and tag not in self._held:
            self._held[tag] = self._hold(tag)
        self._redis.set(MARK, f"mark-{len(self._looks)}-", ex=MARK_LIVES_S)
        self._looks.append(tag)

    def _hold(self, tag: str) -> Path:
        """Hold the checkpoint, and what lies beside all checkpoints."""
        within = self._holder.path / tag
        within.mkdir(parents=True)
        self._holder.hold(tag, within)
        for path in sorted(self._directory.iterdir()):
            beside = not TAG.match(path.name) and not path.name.startswith(".") and path.name not in NOT_KEPT
            if beside:
                try:
                    self._holder.hold(path.name, within)
                except OSError:  # removed just now
                    continue
        return within


def current_tag(directory: Path) -> str | None:
    """The tag of the current checkpoint; None before the first one."""
    try:
        return (directory / CURRENT).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
