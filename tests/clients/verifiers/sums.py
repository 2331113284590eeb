"""A taskset of verifiers with two named rewards, which fails in the way that its settings name."""

import asyncio
import os
import signal
import time

import records
import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnv


class SumData(vf.TaskData):
    answer: str
    number: int


class SumTaskConfig(vf.TaskConfig):
    how: str = "right"
    fails: int = 1
    """How many of the first tasks fail."""


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.number < self.config.fails:
            self._fail()
            await asyncio.sleep(1000 if self.config.how == "waits" else 0)  # until it is cancelled
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / len(trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    def _fail(self) -> None:
        if self.config.how == "raises":
            raise RuntimeError("the grader is gone")
        if self.config.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.config.how == "hangs":
            time.sleep(1000)  # until the host is killed


class SumsConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    count: int = 6
    record: str = ""
    """A file for what the library knows of each trace."""


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        return [
            SumTask(
                SumData(prompt=f"what is {n} + 3?", answer=str(n + 3), number=n, id=str(n)), self.config.task
            )
            for n in range(self.config.count)
        ]


class SumsEnv(SingleAgentEnv):
    async def finalize(self, task, episode):
        if record := self.taskset.config.record:
            records.write(record, episode)


__all__ = ["SumsEnv", "SumsTaskset"]
