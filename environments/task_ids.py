"""The ids of tasks: any name becomes one that the gateway accepts."""

import hashlib
import re
from collections.abc import Mapping

ALLOWED = re.compile(r"[A-Za-z0-9._:@~=+-]{1,200}")
NOT_ALLOWED = re.compile(r"[^A-Za-z0-9._:@~=+-]+")


def task_id(name: str, *parts: object) -> str:
    """An id that the gateway accepts. Another character becomes "-", and a digest then keeps the ids
    apart."""
    given = ":".join((name, *(str(part) for part in parts)))
    if ALLOWED.fullmatch(given):
        return given
    digest = hashlib.sha256(given.encode()).hexdigest()[:12]
    return f"{NOT_ALLOWED.sub('-', given)[:180]}-{digest}"


def id_of(task: object) -> str:
    """The id of any task: its `id`, a text itself, or else a digest of what it is."""
    named = task.get("id") if isinstance(task, Mapping) else getattr(task, "id", None)
    if named is None and not isinstance(task, str):
        return f"task-{hashlib.sha256(repr(task).encode()).hexdigest()[:16]}"
    return task_id(str(task if named is None else named))
