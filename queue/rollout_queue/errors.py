"""What can go wrong between a service and the queue.

QueueError
├─ InvalidRecord          a record that contradicts itself, at birth or at decode
├─ UnknownSchema          bytes written by a newer build
├─ StorageUnavailable     Redis cannot be reached or refuses to store
├─ SessionClosed          the session ended; nothing can be added to it
└─ Conflict               the same id with other content; a group that is full
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
    """The session has an outcome, or was deleted."""


class Conflict(QueueError):
    """An id that exists with other content, or a group with no place left."""
