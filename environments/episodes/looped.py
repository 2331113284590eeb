"""Plays episodes with an agent loop: agents in the episode's sessions, and an environment that answers
them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openai import APIStatusError, OpenAIError

from environments.environment import EnvironmentSource
from environments.episodes.agent import Agent
from environments.episodes.episode import Seat
from environments.errors import EnvironmentFault
from environments.outcome import EpisodeOutcome, Status
from environments.session_client import SessionClient
from environments.step import Step
from environments.task import Task
from rollout_queue import clock

Loop = Callable[..., Awaitable[Step]]
"""`play(agents, environment, task, max_turns)` of a module in `loops/`, or of the user."""

CONTEXT_IS_FULL = "context_length_exceeded"


class LoopedEpisodes:
    """Plays episodes of one source with one loop."""

    def __init__(
        self,
        gateway: SessionClient,
        source: EnvironmentSource,
        loop: Loop,
        *,
        max_turns: int,
        time_limit_s: float,
        graded_elsewhere: bool = False,
    ) -> None:
        self._gateway, self._source, self._loop = gateway, source, loop
        self._max_turns, self._time_limit_s = max_turns, time_limit_s
        self._graded_elsewhere = graded_elsewhere

    async def play(
        self, task: Task, seats: Sequence[Seat], sessions: Sequence[Mapping[str, Any]]
    ) -> list[EpisodeOutcome]:
        agents = [
            Agent(self._gateway.model_client(session), seat.model, seat.sampling)
            for seat, session in zip(seats, sessions, strict=True)
        ]
        status, reason = await self._played(task, agents)
        return [outcome_of(agent, status, reason, self._graded_elsewhere) for agent in agents]

    async def _played(self, task: Task, agents: list[Agent]) -> tuple[Status, str | None]:
        environment = self._source.environment()
        try:
            async with clock.timeout(self._time_limit_s):
                step = await self._loop(agents, environment, task, self._max_turns)
        except TimeoutError:
            return "truncated", f"the episode took longer than {self._time_limit_s:.0f} s"
        except EnvironmentFault as error:
            return "failed", f"environment: {error}"
        except OpenAIError as error:
            if isinstance(error, APIStatusError) and error.code == CONTEXT_IS_FULL:
                return "truncated", "the conversation does not fit into the model's context"
            return "failed", f"model: {type(error).__name__}: {error}"
        finally:
            await environment.close()
        if step.terminated:
            return "completed", None
        why = (
            "the environment cut the episode off"
            if step.truncated
            else f"no end after {self._max_turns} answers"
        )
        return "truncated", why


def outcome_of(agent: Agent, status: Status, reason: str | None, graded_elsewhere: bool) -> EpisodeOutcome:
    """A completed episode that nobody has judged has failed: a missing reward is not 0. An episode with
    rewards of its turns alone ends with 0 more. A failed one has no rewards: what it earned before is no
    judgement."""
    if status == "failed":
        return EpisodeOutcome(status, reason=reason, turns=len(agent.turn_ids), metrics=dict(agent.metrics))
    final = agent.final
    if final is None and agent.judged:
        final = 0.0
    done = EpisodeOutcome(
        status, final, tuple(agent.rewards), reason, len(agent.turn_ids), dict(agent.metrics)
    )
    if status == "completed" and done.reward is None and not graded_elsewhere:
        return replace(done, status="failed", reason="the environment gave no reward")
    return done
