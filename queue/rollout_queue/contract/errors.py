"""What can go wrong between a service and the queue.

QueueError
├─ InvalidRecord          a record that contradicts itself, at birth or at decode
├─ UnknownSchema          bytes written by a newer build
├─ StorageUnavailable     Redis cannot be reached or refuses to store
├─ SessionClosed          the session ended; nothing can be added to it
│  └─ SessionUnknown      it is not there: it never was, or is forgotten
├─ Deleted
│  ├─ SessionDeleted      the session was deleted, and its id is never given again
│  └─ UserDeleted         the user's data was deleted, and nothing more is taken for that name
├─ LeaseLost              another trainer reads the stream now
└─ Conflict               the same id with other content; a group that is full
   └─ SessionForgotten    the id was a session's that is forgotten, and is not given again so soon
"""


class QueueError(Exception):
    """Any failure of the queue."""


class InvalidRecord(QueueError, ValueError):
    """A record contradicts itself."""


class UnknownSchema(QueueError):
    """The bytes carry a schema that this build does not know."""


class StorageUnavailable(QueueError):
    """The record could not be stored or read. Nothing was trained, and nobody may be told it was stored."""


class SessionClosed(QueueError):
    """The session has an outcome, or is not there."""


class SessionUnknown(SessionClosed):
    """There is no such session: there never was, or it is forgotten."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id} is unknown")


class Deleted(QueueError):
    """What is asked for was deleted for good."""


class SessionDeleted(Deleted):
    """The session was deleted: nothing can be added to it, and its id is never given again."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id} was deleted")


class UserDeleted(Deleted):
    """The data of the user was deleted: nothing more is taken for that name."""

    def __init__(self) -> None:
        super().__init__("the data of the user that is named was deleted")


class LeaseLost(QueueError):
    """Another trainer has claimed the lease since. Whoever hears it must end, and write nothing more."""


class Conflict(QueueError):
    """An id that exists with other content, or a group with no place left."""


class SessionForgotten(Conflict):
    """The session ended and is forgotten. A trainer still knows its id, and would take another for it."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id} ended and is forgotten; its id is not given again so soon")
