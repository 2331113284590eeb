"""The loop of one agent: it answers, calls tools, and hears the environment's reply, until the episode
ends."""

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
        if answer.tool_calls:
            for call in answer.tool_calls:
                if call.type == "function":
                    result = await environment.call(call.function.name, call.function.arguments)
                    agent.hears([{"role": "tool", "tool_call_id": call.id, "content": result}])
            continue
        step = await environment.step(answer.content or "")
        agent.metrics |= step.metrics
        agent.earns(step.reward, step.ended)
        if step.ended:
            break
        agent.hears(step.messages)
    return step
