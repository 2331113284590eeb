"""The command line `weir`, which starts, stops, watches and audits everything on one machine, and the client
library, whose names are loaded when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weir import client
    from weir.client import AgentSession, evaluate, group, rollout, session, train

__all__ = ["AgentSession", "client", "evaluate", "group", "rollout", "session", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'weir' has no attribute {name!r}")
    client = import_module("weir.client")
    return client if name == "client" else getattr(client, name)
