"""The stream of a simulation."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollout_queue.contract.records import Record
from rollout_queue.contract.stream import Entry, GroupMembers, Verdicts


@dataclass
class VirtualStream:
    """The stream without Redis: it keeps what was not read, and the verdicts by session."""

    entries: list[Entry] = field(default_factory=list)
    codes: dict[str, str] = field(default_factory=dict)
    written: int = 0

    def append(self, record: Record) -> None:
        self.written += 1
        self.entries.append(Entry(str(self.written), record))

    def confirm(self) -> None:
        pass

    def reclaim(self) -> Iterable[Entry]:
        return []

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        taken, self.entries = self.entries[:count], self.entries[count:]
        return taken

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        assert not self.codes.keys() & verdicts.sessions.keys(), "a session has one verdict"  # noqa: S101
        self.codes |= {session_id: verdict.code for session_id, verdict in verdicts.sessions.items()}

    def verdict_codes(self, session_ids: Collection[str]) -> Mapping[str, str]:
        return {}

    def group_members(self, group_ids: Collection[str]) -> Mapping[str, GroupMembers]:
        return {}

    def image_bytes(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        return {}

    def reserve(self, version: int, location: str) -> int:
        return version

    def report(self, state: Mapping[str, str | int | float]) -> None:
        pass
