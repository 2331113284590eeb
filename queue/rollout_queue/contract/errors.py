"""The errors of the queue. A *forgotten* session was removed some time after its verdict
(`session_retention.py`).

QueueError
├─ InvalidRecord          a record that contradicts itself, when it is made or decoded
├─ UnknownSchema          bytes written by a newer build
├─ RewardsTooLarge        with this reward, the session's rewards would add up to more than 1e9
├─ TooManyRewards         the session has as many rewards as it may have
├─ StorageUnavailable     Redis cannot be reached or refuses to store
├─ SessionClosed          the session ended; nothing can be added to it
│  └─ SessionUnknown      no such session exists: none was opened, or it was forgotten
├─ Deleted
│  ├─ SessionDeleted      the session was deleted, and its id is never used again
│  └─ UserDeleted         the user's data was deleted, and no more data is accepted for that name
├─ LeaseLost              another trainer has claimed the lease, which admits one trainer at a time
└─ Conflict               the id exists with other content, or the group is full
   ├─ GroupTaken          the id is that of another owner's group
   └─ SessionForgotten    the id belonged to a forgotten session, and cannot be used again yet
"""

MOST_REWARDS = 1000
"""How many rewards a session may have."""


class QueueError(Exception):
    """Any failure of the queue."""


class InvalidRecord(QueueError, ValueError):
    """A record contradicts itself."""


class UnknownSchema(QueueError):
    """The bytes carry a schema that this build does not know."""


class RewardsTooLarge(QueueError):
    """With this reward, the magnitudes of the session's rewards would add up to more than 1e9."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"the magnitudes of the rewards of session {session_id} would add up to more than 1e9, beyond "
            "which nothing is trained: give smaller ones, such as from 0 to 1"
        )


class TooManyRewards(QueueError):
    """The session has as many rewards as it may have."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id} has {MOST_REWARDS} rewards, and takes no more: add them up")


class StorageUnavailable(QueueError):
    """The record could not be stored or read. No client may be told that it was stored."""


class SessionClosed(QueueError):
    """The session has an outcome, or does not exist."""


class SessionUnknown(SessionClosed):
    """No such session exists: none was opened, or it was forgotten."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id} is unknown")


class Deleted(QueueError):
    """The session or user that the call names was deleted permanently."""


class SessionDeleted(Deleted):
    """The session was deleted: nothing can be added to it, and its id is never used again."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id} was deleted")


class UserDeleted(Deleted):
    """The data of the user was deleted, and no more data is accepted for that name."""

    def __init__(self) -> None:
        super().__init__("the data of the named user was deleted")


class LeaseLost(QueueError):
    """Another trainer has claimed the lease. The caller must stop, and write nothing more."""


class Conflict(QueueError):
    """The id exists with other content, or the group is full."""


class GroupTaken(Conflict):
    """Another owner has, or had, a group with this id."""

    def __init__(self, group_id: str | None) -> None:
        super().__init__(f"group {group_id} belongs to another client key")


class SessionForgotten(Conflict):
    """A session with this id was forgotten. A trainer may still remember the id, and would mistake a new
    session for the old one."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id} ended and was forgotten; its id cannot be used again yet")
