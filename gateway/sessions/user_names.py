"""Finds the user that a call is made for in its body."""

import re
from collections.abc import Mapping
from typing import Any

from rollout_queue.protocol.ids import ID

CLAUDE_CODE = re.compile(r"user_.*_session_([0-9a-f-]{36})")
"""What Claude Code sends as `metadata.user_id`: an installation and a session, and no user's name."""


def user_named(name: Any) -> str | None:
    """The name, where it is an id that a session could be opened for; else None."""
    return name if isinstance(name, str) and ID.fullmatch(name) else None


def user_in_metadata(metadata: Mapping[str, Any]) -> str | None:
    """The user named by Anthropic's `metadata.user_id`."""
    name = user_named(metadata.get("user_id"))
    return None if name is None or CLAUDE_CODE.fullmatch(name) else name
