"""What a library says of an episode that it has played: a trace for each agent (`hosts/programs/play.py`)."""

import msgspec


class PlayedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's rollout. Its calls belong to the session `session_id`."""

    session_id: str
    agent: str = "agent"
    trained: bool = True
    """Whether the environment wants the agent to learn."""
    ok: bool
    errors: tuple[str, ...] = ()
    truncated: bool = False
    late: bool = False
    """One of the library's own deadlines has expired."""
    stopped_by: str | None = None
    rewards: dict[str, float | None] = {}
    """Each reward times its weight. None means that it was not computed, which is not 0."""
    metrics: dict[str, float] = {}
    turns: int = 0


class PlayedTraces(msgspec.Struct, frozen=True, kw_only=True):
    """An episode is not `ok` unless all its traces are, and what the environment says of them all is."""

    ok: bool
    errors: tuple[str, ...] = ()
    traces: tuple[PlayedTrace, ...] = ()
