"""The loop of one agent: it answers, calls tools, and hears the environment's reply, until the episode
ends."""

from collections.abc import Iterable

from openai.types.chat import ChatCompletionMessageToolCallUnion

from environments.environment import Environment
from environments.episodes.agent import Agent
from environments.step import Step
from environments.task import Task


async def play(agents: list[Agent], environment: Environment, task: Task, max_turns: int) -> Step:
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
