"""Serves a small environment of OpenEnv: python serve.py KIND PORT SESSIONS PING_TIMEOUT.

A client that does not answer a ping within PING_TIMEOUT seconds loses its connection.
"""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class CountAction(Action):
    number: int


class CountObservation(Observation):
    text: str


class Count(Environment):
    """Count three numbers: the first right one earns true, the next nothing, the last a quarter."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **given):
        self.next, self.left = (seed or 0) % 5, [True, None, 0.25]
        return CountObservation(text=f"count from {self.next}", reward=5.0)

    def step(self, action, timeout_s=None, **given):
        if action.number < 0:
            raise RuntimeError("the counter is gone")
        right, self.next = action.number == self.next, self.next + 1
        reward = self.left.pop(0) if right else self.left.pop(0) and 0.0
        return CountObservation(
            text="next", reward=reward, done=not self.left, metadata={"right": float(right)}
        )


class Listed(Count):
    """The same with tasks of its own."""

    def list_splits(self):
        return ["test", "train"]

    def num_tasks(self, split):
        return {"test": 3, "train": 4}[split]

    def reset(self, seed=None, episode_id=None, split=None, index=None, **given):
        return super().reset(seed=index)


class EchoAction(Action):
    text: str


class Echo(Environment):
    """Say anything, twice; variety is rewarded."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **given):
        self.left = 2
        return CountObservation(text=f"say something about {seed}")

    def step(self, action, timeout_s=None, **given):
        self.left -= 1
        return CountObservation(text="more", reward=len(set(action.text)) / 100, done=not self.left)


class Sums(MCPEnvironment):
    """A sum to make with tools: `add` earns something, `submit` ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        mcp = FastMCP("sums")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @mcp.tool
        def submit(value: int) -> str:
            """Give the answer."""
            return "thank you"

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **given):
        return Observation(metadata={"message": "what is 2 + 3?"})

    async def step_async(self, action, timeout_s=None, **given):
        seen = await super().step_async(action, timeout_s, **given)
        if getattr(action, "tool_name", "") == "add" and not seen.error:
            seen.reward = 0.25
        if getattr(action, "tool_name", "") == "submit":
            seen.reward, seen.done = float(action.arguments == {"value": 5}), True
        return seen

    def _step_impl(self, action, timeout_s=None, **given):
        return Observation(metadata={"error": "that is no call"})


KINDS = {
    "count": (Count, CountAction, CountObservation),
    "listed": (Listed, CountAction, CountObservation),
    "echo": (Echo, EchoAction, CountObservation),
    "sums": (Sums, Action, Observation),
}

if __name__ == "__main__":
    kind, port, sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    app = create_app(*KINDS[kind], env_name=kind, max_concurrent_envs=sessions)
    timeout_s = float(sys.argv[4])
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        log_level="error",
        ws_ping_interval=timeout_s,
        ws_ping_timeout=timeout_s,
    )
