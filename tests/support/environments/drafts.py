"""A loop as a user would write it: a draft, then the answer."""

from environments.agents import Agent
from environments.environment import Environment, Step, Task


async def play(agents: list[Agent], environment: Environment, task: Task, max_turns: int) -> Step:
    (agent,) = agents
    step = await environment.reset(task)
    agent.hears(step.messages)
    await agent.answer()
    agent.hears([{"role": "user", "content": "again"}])
    step = await environment.step((await agent.answer()).content or "")
    agent.earns(step.reward, step.ended)
    return step
