"""The list of the sessions of the stream in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout_queue.contract.head import (
    ALL_SESSIONS,
    ListedSession,
    ListPosition,
    ListScope,
    SessionHead,
    Tombstone,
    after_position,
    position_of,
    without_unwanted,
)
from rollout_queue.contract.records import SessionSpec


@dataclass
class MemorySessionList:
    """The sessions and the tombstones, in any order of the list."""

    heads: dict[str, SessionHead] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
    deleted_users: set[str] = field(default_factory=set)

    async def sessions(
        self,
        after: ListPosition,
        count: int,
        wanted: Callable[[SessionSpec], bool] = lambda _: True,
        scope: ListScope = ALL_SESSIONS,
    ) -> Sequence[ListedSession]:
        known: list[SessionHead | Tombstone] = [*self.heads.values(), *self.tombstones.values()]
        found = {position_of(each): each for each in known}
        positions = after_position(found, after, newest_first=scope.newest_first)[:count]
        return [without_unwanted(ListedSession(each, found[each]), wanted) for each in positions]

    async def tombstone(self, session_id: str) -> Tombstone | None:
        return self.tombstones.get(session_id)

    async def user_deleted(self, user: str) -> bool:
        return user in self.deleted_users
