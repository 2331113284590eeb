"""Registration: rollout server ─▶ gateway, `POST /admin/rollout_servers`, every few seconds."""

from pydantic import Field

from rollout_queue.protocol.adapters import WantedAdapters
from rollout_queue.protocol.ids import Id
from rollout_queue.protocol.message import ServiceMessage
from rollout_queue.protocol.policies import PolicyVersion


class ServerBody(ServiceMessage):
    """A rollout server says where it, and its engine, can be reached."""

    url: str = Field(pattern=r"^https?://")
    engine_url: str = Field(pattern=r"^https?://")
    id: Id
    process: str | None = Field(None, min_length=1, max_length=128)
    """What `ServerStatus.process` says; null for a server that an operator registers."""
    forget_after_s: float | None = Field(None, gt=0)
    """The gateway removes a dead server that has not registered for this time; null means that it stays."""


class Registered(ServiceMessage):
    """The gateway's answer: the policy that the fleet serves, null before the first, and the adapters that
    are policies of their own."""

    id: str
    policy: PolicyVersion | None = None
    adapters: WantedAdapters | None = None
