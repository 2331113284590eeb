"""The client library: sessions around an agent's code, groups of them that train, and evaluations."""

from weir.client.agent_sessions import AgentSession, GatewayAddress, find_gateway, group, session
from weir.client.rollout_groups import AgentRun, evaluate, evaluate_async, rollout, train, train_async
from weir.shared import GatewayFault, RunStopped, SessionRefused

__all__ = [
    "AgentRun",
    "AgentSession",
    "GatewayAddress",
    "GatewayFault",
    "RunStopped",
    "SessionRefused",
    "evaluate",
    "evaluate_async",
    "find_gateway",
    "group",
    "rollout",
    "session",
    "train",
    "train_async",
]
