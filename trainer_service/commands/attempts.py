"""Notes which command is carried out, so that one that ends the process does not do so for ever.

{checkpoint_dir}/COMMAND    the command that is carried out, and how many processes each has ended
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rollout_queue.commands.command import LoggedCommand, Refused
from trainer_service.commands.live_model import place_in

COMMAND = "COMMAND"
MOST_ENDS = 3
"""A command that has ended so many processes is not tried again."""


class CommandNote(msgspec.Struct):
    """Places in the log."""

    computes: str | None = None
    """The command that is carried out now."""
    ends: dict[str, int] = {}
    """How many processes ended while they carried out a command."""


class CommandAttempts:
    """Counts how often a process ended during a command. The file need not survive a power cut, so writing it
    takes no sync; a disk that refuses it does not hinder the training."""

    def __init__(self, checkpoint_dir: Path) -> None:
        self._path = checkpoint_dir / COMMAND
        self._note = self._read()
        if self._note.computes is not None:  # the last process ended during this command
            ends = self._note.ends.get(self._note.computes, 0)
            self._note.ends[self._note.computes] = ends + 1
            self._note.computes = None

    def refusal(self, command: LoggedCommand) -> str | None:
        """Why a command is not tried again; None if it is."""
        ends = self._note.ends.get(command.position, 0)
        if ends < MOST_ENDS:
            return None
        return (
            f"the trainer ended {ends} times while it carried out this command, perhaps for lack of memory; "
            "it had no effect. Send less in one command"
        )

    @contextmanager
    def noted(self, command: LoggedCommand) -> Iterator[None]:
        """Inside the context, the process carries out this command."""
        if isinstance(command.command, Refused):
            yield
            return
        self._note.computes = command.position
        self._write()
        yield
        self._note.computes = None
        self._write()

    def forget(self, position: str) -> None:
        """Forget the commands up to this place, which no replay reaches."""
        self._note.ends = {
            each: ends for each, ends in self._note.ends.items() if place_in(each) > place_in(position)
        }

    def _read(self) -> CommandNote:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=CommandNote)
        except (OSError, msgspec.DecodeError):  # a power cut may have left a part of it
            return CommandNote()

    def _write(self) -> None:
        aside = self._path.with_name(f".{COMMAND}.tmp")
        with suppress(OSError):
            aside.write_bytes(msgspec.json.encode(self._note))
            aside.replace(self._path)
