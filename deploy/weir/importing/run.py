"""The import itself: rows to sessions, sessions to Redis, and an account of what became of each.

files ─▶ rows ─▶ sessions (rows that stand together) ─▶ restore ─▶ imported | there already | refused
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from redis import Redis

from rollout_queue.contract.episodes import Episode, episode_of, renamed
from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.rows import DeletedExportRow, ExportRow
from rollout_queue.redis.restore import Restored, restore
from weir.errors import StackError
from weir.importing.files import LocatedRow, rows_of

ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:@~=+-]{1,200}")
"""What the gateway takes for an id; a session of another name could never be asked for."""
CONFLICTS: dict[Restored, str] = {
    "owner": "its group belongs to another client key",
    "size": "its group is there with another size",
    "full": "its group has all of its sessions already",
    "forgotten": "it, or its group, ended here and is forgotten; a trainer may know it: see --as-new",
}

Complain = Callable[[str], None]


@dataclass
class ImportReport:
    """What became of everything that was read."""

    sessions: int = 0
    turns: int = 0
    there: int = 0
    deleted: int = 0
    refused: int = 0
    groups: Counter[str] = field(default_factory=Counter)
    """How many members of a group are still to come, by group; none of a complete one."""

    def sentences(self) -> Iterator[str]:
        yield f"{self.sessions} sessions with {self.turns} turns are imported"
        if self.there:
            yield f"{self.there} sessions were there already, and are as they were"
        if self.deleted:
            yield f"{self.deleted} sessions were deleted once, and stay so"
        if self.refused:
            yield f"{self.refused} sessions or rows are refused"
        if partial := sum(missing > 0 for missing in self.groups.values()):
            yield (
                f"{partial} groups are not complete: the trainer goes on without the missing members after "
                "its group_wait_s"
            )


class ReadableRow(NamedTuple):
    """A row, and where it stands."""

    place: str
    row: ExportRow | DeletedExportRow


def import_files(
    redis: Redis, files: Sequence[Path], prefix: str, strict: bool, complain: Complain
) -> ImportReport:
    """Raises StackError at the first refusal when `strict`; else each is told to `complain`."""
    account = ImportReport()

    def refuse(place: str, why: str) -> None:
        account.refused += 1
        if strict:
            raise StackError(f"{place}: {why}")
        complain(f"{place}: {why}")

    for _, gathered in groupby(_readable(rows_of(files), refuse), lambda placed: placed.row.session_id):
        first, *rest = gathered
        if isinstance(first.row, DeletedExportRow):
            account.deleted += 1
            continue
        try:
            episode = _episode(
                [placed.row for placed in (first, *rest) if isinstance(placed.row, ExportRow)], prefix
            )
        except InvalidRecord as error:
            refuse(first.place, str(error))
            continue
        reply = restore(redis, episode)
        if why := CONFLICTS.get(reply):
            refuse(first.place, f"session {episode.spec.session_id}: {why}")
        _count(account, episode, reply)
    return account


def _readable(rows: Iterator[LocatedRow], refuse: Callable[[str, str], None]) -> Iterator[ReadableRow]:
    """Without the rows that are none; their session, which lacks them, is refused by itself."""
    for placed in rows:
        if placed.row is None:
            refuse(placed.place, placed.problem)
        else:
            yield ReadableRow(placed.place, placed.row)


def _episode(rows: list[ExportRow], prefix: str) -> Episode:
    episode = episode_of([renamed(row, prefix) for row in rows] if prefix else rows)
    spec = episode.spec
    for name in (spec.session_id, spec.group_id, spec.task_id, spec.user):
        if name is not None and not ID.fullmatch(name):
            raise InvalidRecord(f"{name!r} is no id")
    known = {turn.turn_id for turn in episode.turns}
    for turn in episode.turns:
        if turn.parent_id is not None and turn.parent_id not in known:
            raise InvalidRecord(f"turn {turn.turn_id} continues {turn.parent_id}, which is not here")
    return episode


def _count(account: ImportReport, episode: Episode, reply: Restored) -> None:
    spec = episode.spec
    if reply == "restored":
        account.sessions += 1
        account.turns += len(episode.turns)
    account.there += reply == "exists"
    account.deleted += reply == "deleted"
    if spec.group_id is not None and spec.group_size is not None and reply in ("restored", "exists"):
        account.groups.setdefault(spec.group_id, spec.group_size)
        account.groups[spec.group_id] -= 1
