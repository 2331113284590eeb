"""What becomes of a field that the gateway does not know: the call is served and names it, or is refused.

with Reading(report=True) as ignored ── decode_body, check_fields ──▶ note_unknown("messages[1].mood")
ignored.paths ──▶ the turn's `ignored_fields`, the header `x-weir-ignored-fields`, the metric
"""

from contextvars import ContextVar, Token
from types import TracebackType
from urllib.parse import quote

from gateway.errors import InvalidRequest

MOST_PATHS = 32
MOST_PATH_CHARS = 128
MOST_HEADER_CHARS = 2048
"""aiohttp refuses a header over 8 KiB, Node headers over 16 KiB in total."""


class Reading:
    """A block that reads one request, whose unknown fields it collects; without `report` they are refused."""

    def __init__(self, *, report: bool) -> None:
        self._report = report
        self._outside: Token[Reading | None]
        self.paths: list[str] = []
        """The paths of the fields that the gateway ignores: the first MOST_PATHS."""

    def __enter__(self) -> "Reading":
        self._outside = _READING.set(self if self._report else None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _READING.reset(self._outside)

    def add(self, path: str) -> None:
        shown = path if len(path) <= MOST_PATH_CHARS else path[: MOST_PATH_CHARS - 1] + "…"
        if len(self.paths) < MOST_PATHS and shown not in self.paths:
            self.paths.append(shown)


_READING: ContextVar[Reading | None] = ContextVar("reading", default=None)
"""Of the request that is being read. None: an unknown field is refused."""


def note_unknown(path: str) -> None:
    """Note an unknown field. Raises InvalidRequest that names it, if such fields are refused."""
    if (ignored := _READING.get()) is None:
        raise InvalidRequest(f"{path}: unknown field", param=path, code="unknown_parameter")
    ignored.add(path)


def ignored_header(paths: tuple[str, ...]) -> dict[str, str]:
    """The header that names ignored fields. All but letters, digits and `[]._-~` is percent-encoded UTF-8, so
    a header can hold it, and a comma only separates. Paths that do not fit are left out."""
    told = ""
    for path in paths:
        more = (", " if told else "") + quote(path, safe="[]", errors="replace")
        if len(told) + len(more) > MOST_HEADER_CHARS:
            break
        told += more
    return {"x-weir-ignored-fields": told} if paths else {}
