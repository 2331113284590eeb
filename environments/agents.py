"""Agents that play an environment: an agent calls the model in its session, and keeps its conversation and
its rewards; a loop has agents and environment take turns, and says how the episode ended. The loops are
short, so that a user can copy and change them: one agent with tools, and the players of a game.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageToolCallUnion

from environments.environment import (
    Environment,
    EnvironmentSource,
    EpisodeOutcome,
    Message,
    Status,
    Step,
    Task,
    TurnReward,
)
from environments.episodes import Seat
from environments.errors import CONTEXT_IS_FULL, EnvironmentFault, fills_context
from environments.session_client import SessionClient
from rollout_queue import clock


class Agent:
    """`sampling` are parameters of chat completions; the session's own win over them where it enforces
    them."""

    def __init__(self, client: AsyncOpenAI, model: str, sampling: Mapping[str, Any]) -> None:
        self._client, self._model, self._sampling = client, model, dict(sampling)
        self.messages: list[Message] = []
        self.rewards: list[TurnReward] = []
        self.turn_ids: list[str] = []
        self.finish_reason = ""
        """Why the last answer ended."""
        self.final: float | None = None
        self.judged = False
        """Whether any answer has a reward, also one of 0."""
        self.metrics: dict[str, float] = {}

    def hears(self, messages: Iterable[Message]) -> None:
        self.messages.extend(messages)

    async def answer(self, tools: Iterable[dict[str, Any]] = ()) -> ChatCompletionMessage:
        """The model's next message, which becomes part of the conversation. Raises OpenAIError."""
        offered: Any = {"tools": given} if (given := list(tools)) else {}
        asked: Any = self.messages
        completion = await self._client.chat.completions.create(
            model=self._model, messages=asked, **offered, **self._sampling
        )
        message: ChatCompletionMessage = completion.choices[0].message
        self.turn_ids.append(completion.id)
        self.finish_reason = completion.choices[0].finish_reason
        self.messages.append(message.model_dump(exclude_none=True))
        return message

    def earns(self, reward: float | None, ended: bool) -> None:
        """Credit a reward to the last answer, or to the whole episode if it has ended."""
        if reward is None:
            return
        self.judged = True
        if ended or not self.turn_ids:
            self.final = (self.final or 0.0) + reward
        else:
            self.rewards.append(TurnReward(self.turn_ids[-1], reward))


async def play_conversation(
    agents: list[Agent], environment: Environment, task: Task, max_turns: int
) -> Step:
    """Returns the last step. A step that has not ended means that `max_turns` answers were not enough."""
    (agent,) = agents
    step = await environment.reset(task)
    agent.hears(step.messages)
    for _ in range(max_turns):
        answer = await agent.answer(environment.tools)
        if answer.tool_calls and environment.tools:  # a model may invent tools where there are none
            step = await _call(agent, environment, answer.tool_calls, step)
        else:
            step = await environment.step(answer.content or "")
            _credit(agent, step)
            agent.hears(step.messages)
        if step.ended:
            break
    return step


async def _call(
    agent: Agent, environment: Environment, calls: Iterable[ChatCompletionMessageToolCallUnion], step: Step
) -> Step:
    """Make the calls of one answer, in their order, until one of them ends the episode."""
    for call in calls:
        if call.type == "function":
            step = await environment.call(call.function.name, call.function.arguments)
            _credit(agent, step)
            agent.hears({**message, "tool_call_id": call.id} for message in step.messages)
            if step.ended:
                break
    return step


def _credit(agent: Agent, step: Step) -> None:
    agent.metrics |= step.metrics
    agent.earns(step.reward, step.ended)


async def play_game(agents: list[Agent], environment: Environment, task: Task, max_turns: int) -> Step:
    """`agents[p]` is player p. Returns the last step; `max_turns` counts the answers of all players."""
    step = await environment.reset(task)
    for _ in range(max_turns):
        player = player_of(agents, step.player)
        player.hears(step.messages)
        answer = await player.answer()
        step = await environment.step(answer.content or "")
        player.earns(step.reward, step.ended)
        if step.ended:
            break
    for number, reward in step.rewards.items():
        player_of(agents, number).earns(reward, ended=True)
    return step


def player_of(agents: list[Agent], number: int) -> Agent:
    """Raises EnvironmentFault for a player that there is not."""
    if not 0 <= number < len(agents):
        raise EnvironmentFault(f"the environment names player {number}, and has {len(agents)}")
    return agents[number]


Loop = Callable[..., Awaitable[Step]]
"""`play(agents, environment, task, max_turns)` of a module in `loops/`, or of the user."""


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
            if fills_context(error):
                return "truncated", CONTEXT_IS_FULL
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
