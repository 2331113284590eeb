"""For whom a call is made, as far as its body says."""

import re
from collections.abc import Mapping
from typing import Any

from rollout_queue.protocol.ids import ID

CLAUDE_CODE = re.compile(r"user_.*_session_([0-9a-f-]{36})")
"""What Claude Code writes into `metadata.user_id`: an installation and a session, and nobody by name."""


def user_named(name: Any) -> str | None:
    """The user of this name; nobody where it is none that a session could be opened for."""
    return name if isinstance(name, str) and ID.fullmatch(name) else None


def user_in_metadata(metadata: Mapping[str, Any]) -> str | None:
    """The user whom Anthropic's `metadata.user_id` names."""
    name = user_named(metadata.get("user_id"))
    return None if name is None or CLAUDE_CODE.fullmatch(name) else name
