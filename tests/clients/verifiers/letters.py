"""A taskset of verifiers: the agent asks a tool for the values of letters, and answers two questions."""

import records
import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnv

WORLD = {"c": "7", "d": "3", "e": "9", "f": "1"}


class LettersToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def get(self, key: str) -> str:
        """Gets the value of a key."""
        return f"{key} = {WORLD.get(key, 'nothing')}"


class LettersData(vf.TaskData):
    answer: str


class LettersTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LettersTask(vf.Task[LettersData, vf.State, LettersTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [LettersToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        said = [node.message.content for node in trace.nodes if node.message.role == "assistant"]
        return float(self.data.answer in str(said[-1]))


class LettersConfig(vf.TasksetConfig):
    task: LettersTaskConfig = LettersTaskConfig()
    record: str = ""
    """A file for what the library knows of each trace."""


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        return [
            LettersTask(LettersData(prompt=f"value of {key}?", answer=value), self.config.task)
            for key, value in WORLD.items()
        ]


class LettersEnv(SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as asked:
            if not (await asked.turn()).terminated:
                await asked.turn("value of d?")

    async def finalize(self, task, episode):
        if self.taskset.config.record:
            records.write(self.taskset.config.record, episode)


__all__ = ["LettersEnv", "LettersTaskset"]

if __name__ == "__main__":
    LettersToolset.run()
