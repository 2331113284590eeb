"""The two forms of a log line: text, and one JSON object. A line is bounded, holds no control character and
no secret."""

import json
import logging
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from rollout_queue.signals.log_ids import log_ids

MOST_BYTES = 64 * 2**10
"""Of one line in JSON, or one line of text. Longer texts lose their middle."""
SHORTEST_SECRET = 8
"""A shorter secret is not searched for: its letters would be found in harmless words."""
HARMFUL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that end a line, command a terminal, turn the direction of text, or have no UTF-8."""
BEARER = re.compile(r"(?i)\b(bearer\s+|x-api-key\W{1,4})[^\s'\",;]+")
CREDENTIALS = re.compile(r"://[^/@\s]*@")


class SecretFilter:
    """Replaces secrets in texts: those that it knows, and what looks like a request's key or password."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted({each for each in secrets if len(each) >= SHORTEST_SECRET}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def clean(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub("***", text)
        return CREDENTIALS.sub("://***@", BEARER.sub(r"\1***", text))


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER: MESSAGE` in one line. The lines of a traceback follow, each indented."""

    def __init__(self, secrets: SecretFilter, process: str = "") -> None:
        """`process`: what distinguishes processes of one service that share a log."""
        super().__init__()
        self._secrets = secrets
        self._process = f" {process}" if process else ""

    def format(self, record: logging.LogRecord) -> str:
        at = self.formatTime(record)
        head = f"{at}{self._process} {record.levelname} {record.name}: "
        line = head + escaped(self._secrets.clean(record.getMessage()))
        if trace := _traceback(self, record):
            return "\n".join([shortened(line), *_indented(self._secrets.clean(trace))])
        return shortened(line)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII: time, level, logger, message, ids, and the exception as text."""

    def __init__(self, secrets: SecretFilter, process: str = "") -> None:
        super().__init__()
        self._secrets = secrets
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
            **log_ids().fields(),
            **getattr(record, "fields", {}),
        }
        if trace := _traceback(self, record):
            fields["exception"] = trace
        fields = {
            name: self._secrets.clean(value) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        return _bounded(fields)


def escaped(text: str) -> str:
    r"""The text without harmful characters, which are written as \n, \x1b and the like."""
    return HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int = MOST_BYTES) -> str:
    """The text with its middle left out if it has more than `most` bytes in UTF-8."""
    size = len(text.encode(errors="replace"))
    if size <= most:
        return text
    kept = max(0, most * len(text) // size - 64) // 2  # a text of one kind has about even characters
    while kept and len((text[:kept] + text[-kept:]).encode(errors="replace")) > most - 64:
        kept = kept * 3 // 4
    left_out = len(text) - 2 * kept
    return f"{text[:kept]} … {left_out} characters … {text[len(text) - kept :]}"


def _bounded(fields: dict[str, Any]) -> str:
    """The fields as JSON. If that is too long, texts are shortened until it is not."""
    most = MOST_BYTES
    while len(line := json.dumps(fields, default=str)) > MOST_BYTES:
        most //= 2
        fields = {
            name: shortened(value, most) if isinstance(value, str) else value
            for name, value in fields.items()
        }
    return line


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    return "\n".join([*parts, formatter.formatStack(record.stack_info)] if record.stack_info else parts)


def _indented(trace: str) -> list[str]:
    """The lines of a traceback. Its message may hold line ends, and no line may look like a new entry."""
    return [f"    {shortened(escaped(line))}" for line in shortened(trace).split("\n")]
