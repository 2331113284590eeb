"""One episode: opens its sessions, has the loop play it, and tells the gateway how it ended."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openai import APIStatusError, OpenAIError

from environments.environment import EnvironmentSource
from environments.episodes.agent import Agent
from environments.errors import EnvironmentFault, SessionRefused
from environments.outcome import EpisodeOutcome, Status
from environments.session_client import SessionClient
from environments.step import Step
from environments.task import Task

Loop = Callable[..., Awaitable[Step]]
"""`play(agents, environment, task, max_turns)` of a module in `loops/`, or of the user."""

CONTEXT_IS_FULL = "context_length_exceeded"
SOURCE = "environment"
"""Where the rewards of turns come from, as recorded sessions say."""


@dataclass(frozen=True)
class Seat:
    """One agent's place in an episode: its session, its model and its sampling parameters. An opponent's seat
    is not rewarded."""

    session_id: str
    description: dict[str, Any]
    model: str
    sampling: dict[str, Any]
    learns: bool = True


class EpisodePlayer:
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

    async def open(self, seats: Sequence[Seat]) -> list[dict[str, Any]]:
        """Open the sessions of an episode. The same seats get the same sessions again."""
        return [await self._gateway.open_session(seat.session_id, seat.description) for seat in seats]

    async def play(
        self, task: Task, seats: Sequence[Seat], sessions: Sequence[Mapping[str, Any]]
    ) -> list[EpisodeOutcome]:
        """Play an episode in its open sessions. Returns the outcome for each seat, which the gateway has
        stored."""
        agents = [
            Agent(self._gateway.model_client(session), seat.model, seat.sampling)
            for seat, session in zip(seats, sessions, strict=True)
        ]
        status, reason = await self._played(task, agents)
        outcomes = [outcome_of(agent, status, reason, self._graded_elsewhere) for agent in agents]
        return await self._tell_all(seats, outcomes)

    async def abandon(self, seats: Sequence[Seat], reason: str) -> list[EpisodeOutcome]:
        """End an episode that nobody needs any more."""
        outcomes = [EpisodeOutcome("abandoned", reason=reason) for _ in seats]
        return await self._tell_all(seats, outcomes)

    async def _played(self, task: Task, agents: list[Agent]) -> tuple[Status, str | None]:
        environment = self._source.environment()
        try:
            async with asyncio.timeout(self._time_limit_s):
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

    async def _tell_all(
        self, seats: Sequence[Seat], outcomes: Sequence[EpisodeOutcome]
    ) -> list[EpisodeOutcome]:
        """Tell how each seat's episode ended; returns what was stored. Who is cancelled meanwhile has ended,
        too: it is told to the end, because a session has one outcome."""

        async def tell() -> list[EpisodeOutcome]:
            return [await self._tell(*each) for each in zip(seats, outcomes, strict=True)]

        telling = asyncio.create_task(tell())
        try:
            return await asyncio.shield(telling)
        except asyncio.CancelledError:
            return await telling

    async def _tell(self, seat: Seat, outcome: EpisodeOutcome) -> EpisodeOutcome:
        """Store the rewards of a seat that learns, then how its episode ended. The session's verdict needs
        both."""
        try:
            for number, given in enumerate(outcome.turn_rewards if seat.learns else ()):
                key = f"turn-{number}"
                await self._gateway.reward(seat.session_id, key, given.value, given.turn_id, SOURCE)
            final = outcome.final if seat.learns else None
            await self._gateway.finish(seat.session_id, outcome.status, final, outcome.reason)
        except SessionRefused as error:  # it has expired or was deleted; other episodes go on
            return EpisodeOutcome("failed", reason=str(error), turns=outcome.turns)
        return outcome


def outcome_of(agent: Agent, status: Status, reason: str | None, graded_elsewhere: bool) -> EpisodeOutcome:
    """A completed episode that nobody has judged has failed: a missing reward is not 0. One with rewards of
    its turns alone ends with 0 more. A failed one has no rewards: what it earned before is no judgement."""
    if status == "failed":
        return EpisodeOutcome(status, reason=reason, turns=len(agent.turn_ids), metrics=dict(agent.metrics))
    final = agent.final
    if status == "completed" and final is None and agent.judged:
        final = 0.0
    done = EpisodeOutcome(
        status, final, tuple(agent.rewards), reason, len(agent.turn_ids), dict(agent.metrics)
    )
    if status == "completed" and done.reward is None and not graded_elsewhere:
        return replace(done, status="failed", reason="the environment gave no reward")
    return done
