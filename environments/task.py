"""A task: what an environment needs to begin an episode, under an id that recorded sessions carry."""

import hashlib
import re
from typing import Any

import msgspec

ALLOWED = re.compile(r"[A-Za-z0-9._:@~=+-]{1,200}")
NOT_ALLOWED = re.compile(r"[^A-Za-z0-9._:@~=+-]+")


class Task(msgspec.Struct, frozen=True):
    """`data` goes to the environment's `reset` unchanged; `id` is the `task_id` of the sessions."""

    id: str
    data: dict[str, Any]


def task_id(name: str, *parts: object) -> str:
    """An id that the gateway accepts. Another character becomes "-", and a digest then keeps the ids
    apart."""
    given = ":".join((name, *(str(part) for part in parts)))
    if ALLOWED.fullmatch(given):
        return given
    digest = hashlib.sha256(given.encode()).hexdigest()[:12]
    return f"{NOT_ALLOWED.sub('-', given)[:180]}-{digest}"
