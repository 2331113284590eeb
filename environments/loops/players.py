"""The loop of a game: whoever is next answers what concerns it, and at the end each player gets its
reward."""

from environments.environment import Environment
from environments.episodes.agent import Agent
from environments.errors import EnvironmentFault
from environments.step import Step
from environments.task import Task


async def play(agents: list[Agent], environment: Environment, task: Task, max_turns: int) -> Step:
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
