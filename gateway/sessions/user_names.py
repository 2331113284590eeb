"""Finds, in the body of a call, the user for whom the call is made."""

import re
from collections.abc import Mapping
from typing import Any

from rollout_queue.protocol.ids import ID

CLAUDE_CODE = re.compile(r"user_.*_session_([0-9a-f-]{36})")
"""Claude Code's `metadata.user_id`. It names an installation and a session, and no user."""


def user_named(name: Any) -> str | None:
    """The name if it has the form of an id (`protocol.ids`); else None."""
    return name if isinstance(name, str) and ID.fullmatch(name) else None


def user_in_metadata(metadata: Mapping[str, Any]) -> str | None:
    """The user named by Anthropic's `metadata.user_id`."""
    name = user_named(metadata.get("user_id"))
    return None if name is None or CLAUDE_CODE.fullmatch(name) else name
