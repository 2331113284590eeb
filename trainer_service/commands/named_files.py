"""The files that commands save under names.

{root}/{model}/{name}/{place in the log}/    the files of one command

Files that are overwritten stay until no replay of the log can ask for them: a command that reads a name takes
the newest files that were saved before it in the log. Likewise files that are deleted: they are gone for the
commands after the deletion, and stay on the disk until no replay can ask for them.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rollout_queue.commands.command import LoggedCommand
from rollout_queue.commands.log import BEGINNING, Dropped
from trainer_service.commands.live_model import SAFE_NAME, place_in, safe_name
from trainer_service.commands.validation import CommandRefused
from trainer_service.storage.disk import written
from trainer_service.storage.files import sync_directory, sync_tree

ASIDE = ".tmp"


class NamedFiles:
    """Files of one kind. A name has a directory for each time it was saved."""

    def __init__(self, root: Path, kind: str, noun: str) -> None:
        """`kind` is the first part of the names in the log; `noun` is what users call such files."""
        self._root, self._kind, self._noun = root, kind, noun
        self.dropped = Dropped({}, {})
        """What is deleted, as far as the commands know that are carried out."""

    def check_free(self, logged: LoggedCommand, name: str) -> None:
        """Raises CommandRefused if the name cannot be used, or is used already."""
        if self.before(logged.position, logged.model_id, name):
            raise CommandRefused(f"{logged.model_id} has {self._noun} {name} already")

    def place(self, logged: LoggedCommand, name: str) -> Path:
        """The directory of what this command saves. Raises CommandRefused for a name that cannot be used."""
        return self._named(logged.model_id, name) / logged.position

    def is_written(self, logged: LoggedCommand, name: str) -> bool:
        """Whether this very command has written its files before."""
        return self.place(logged, name).exists()

    def write_files(self, logged: LoggedCommand, name: str, write: Callable[[Path], object]) -> None:
        """Have `write` write the files, durably and all or none. Raises DiskTrouble, and leaves no files
        then."""
        final = self.place(logged, name)
        aside = final.with_name(f"{final.name}{ASIDE}")
        shutil.rmtree(aside, ignore_errors=True)  # of a process that died
        with written(f"{self._kind}/{name}", lambda: shutil.rmtree(aside, ignore_errors=True)):
            aside.mkdir(parents=True)
            write(aside)
            sync_tree(aside)
            aside.rename(final)
            for directory in (final.parent, final.parent.parent, self._root, self._root.parent):
                sync_directory(directory)

    def size(self, logged: LoggedCommand, name: str) -> int:
        """How many bytes the files take that this command has written."""
        return sum(path.stat().st_size for path in self.place(logged, name).rglob("*") if path.is_file())

    def before(self, position: str, model_id: str, name: str) -> list[Path]:
        """What was saved under a name before this place in the log, and not deleted before it."""
        drops = self.dropped.weights.get((model_id, f"{self._kind}/{name}"), ())
        gone = [place_in(each.saved) for each in drops if place_in(each.deleted) < place_in(position)]
        first, saved = max(gone, default=place_in(BEGINNING)), _saved(self._named(model_id, name))
        return [each for each in saved if first < place_in(each.name) < place_in(position)]

    def prune(self, position: str) -> None:
        """Remove what was overwritten by commands up to this place, which no replay begins before."""
        for name in self._root.glob("*/*"):
            for old in _up_to(position, name)[:-1]:
                shutil.rmtree(old, ignore_errors=True)

    def remove(self, model_id: str, name: str, saved: str) -> None:
        """Remove what was saved under a name up to this place in the log. Raises OSError if files stay."""
        directory = self._named(model_id, name)
        for old in _up_to(saved, directory):
            shutil.rmtree(old)
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()

    def remove_all(self, model_id: str) -> None:
        """Remove what is left of a model that is gone: what a process had written that died before it could
        answer. Raises OSError if files stay."""
        directory = self._root / safe_name(model_id)
        if directory.is_dir():
            shutil.rmtree(directory)

    def _named(self, model_id: str, name: str) -> Path:
        if not SAFE_NAME.fullmatch(name):
            raise CommandRefused(
                f"{name!r} is no name of {self._noun}: take 1 to 64 letters, digits, dots, dashes and "
                "underscores, the first a letter or a digit"
            )
        return self._root / safe_name(model_id) / name


def _up_to(position: str, name: Path) -> list[Path]:
    return [each for each in _saved(name) if place_in(each.name) <= place_in(position)]


def _saved(name: Path) -> list[Path]:
    """The complete directories of a name, in the order of the log."""
    return sorted(_complete(name), key=lambda path: place_in(path.name))


def _complete(name: Path) -> Iterator[Path]:
    if name.is_dir():
        yield from (each for each in name.iterdir() if not each.name.endswith(ASIDE))
