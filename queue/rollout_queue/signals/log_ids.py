"""The ids that each log line of a request or a step carries.

request ──▶ LogIds in a context variable ──▶ every log line of its task, and of the tasks that it starts
"""

from contextvars import ContextVar, Token

MOST_CHARACTERS = 256
"""Of one id in a log line: a session id may come from a client."""


class LogIds:
    """What is known so far of the present work. The parts that find out more write it here."""

    __slots__ = ("key", "request_id", "session_id", "step", "turn_id")

    def __init__(self, request_id: str | None = None, session_id: str | None = None) -> None:
        self.request_id = request_id
        self.session_id = session_id
        self.turn_id: str | None = None
        self.step: int | None = None
        self.key: str | None = None
        """The name of the caller's key; for the access log alone."""

    def fields(self) -> dict[str, str | int]:
        """The ids that are known, by the names that they have in a log line."""
        found = {
            "request_id": self.request_id,
            "session_id": self.session_id,
            "turn_id": self.turn_id,
            "step": self.step,
        }
        return {
            name: value if isinstance(value, int) else value[:MOST_CHARACTERS]
            for name, value in found.items()
            if value is not None
        }


_ids: ContextVar[LogIds | None] = ContextVar("log_ids", default=None)


def begin_log_ids(request_id: str | None = None, session_id: str | None = None) -> LogIds:
    """The ids of a request that begins, or of a thread's work."""
    ids = LogIds(request_id, session_id)
    _ids.set(ids)
    return ids


def log_ids() -> LogIds:
    """The ids of the present work. Without any, new ones that no other line has."""
    return _ids.get() or LogIds()


class of_turn:  # noqa: N801 - it is used as a function; a generator would take three times as long
    """Log lines in the block carry this turn's id. The ids of a call keep that of its first turn; further
    turns, which may be made concurrently, have ids of their own."""

    __slots__ = ("_token", "_turn_id")

    def __init__(self, turn_id: str) -> None:
        self._turn_id = turn_id

    def __enter__(self) -> None:
        self._token: Token[LogIds | None] | None = None
        former = log_ids()
        if former.turn_id in (None, self._turn_id):
            former.turn_id = self._turn_id
            return
        own = LogIds(former.request_id, former.session_id)
        own.step, own.key, own.turn_id = former.step, former.key, self._turn_id
        self._token = _ids.set(own)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _ids.reset(self._token)
