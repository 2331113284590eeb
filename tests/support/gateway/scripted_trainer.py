"""A trainer that answers each command at once with numbers that a test can predict, on a real command log.

`tests/trainer_service` has the real one; both read with `CommandReader`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from redis import Redis

from rollout_queue.contract.packed_tokens import Logprobs
from rollout_queue.redis.command_log import CommandReader
from rollout_queue.redis.lease import Lease
from rollout_queue.trainer_commands import (
    BEGINNING,
    CommandFailed,
    Created,
    CreateModel,
    Exported,
    ForwardBackward,
    LoadWeights,
    LoggedCommand,
    OptimStep,
    Passed,
    Published,
    Refused,
    Result,
    Saved,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    Stepped,
    WeightsLoaded,
)
from tests.support.threads import meanwhile


@dataclass
class ScriptedTrainer:
    """`seen` has the commands that it answers, in order."""

    reader: CommandReader
    seen: list[LoggedCommand] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    """While it is clear, nothing is answered."""
    ended: threading.Event = field(default_factory=threading.Event)
    result_of: Callable[[LoggedCommand], Result] = field(default_factory=lambda: result_of)

    def run(self) -> None:
        after = BEGINNING
        while not self.ended.is_set():
            for command in self.reader.read(after, 100, 0.05):
                while not (self.go_on.wait(0.05) or self.ended.is_set()):
                    pass
                self.seen.append(command)  # before a client hears of it
                self.reader.answer(command, self.result_of(command))
                after = command.position


def result_of(logged: LoggedCommand) -> Result:
    """What the trainer answers. The log-probability of target 7 is -0.007."""
    match logged.command:
        case CreateModel():
            return Created()
        case ForwardBackward(data=data):
            logprobs = tuple(Logprobs([-target / 1000 for target in datum.targets]) for datum in data)
            return Passed(logprobs, data[0].k, {"loss:sum": -sum(map(sum, logprobs))})
        case OptimStep(learning_rate=rate):
            return Stepped({"grad_norm": 1.5, "learning_rate": rate})
        case SaveWeights():
            return Saved(1234)
        case SaveForSampler():
            return Published(logged.model_id.replace(":", "."), logged.number, "/nowhere")
        case SaveExternal():
            return Exported("/nowhere", 5678)
        case LoadWeights():
            return WeightsLoaded()
        case Refused(error):
            return CommandFailed(error, "user")


@contextmanager
def scripted_trainer(redis: Redis) -> Iterator[ScriptedTrainer]:
    """A trainer that holds the lease until the end of the block."""
    lease = Lease(redis, 60)
    assert lease.claim() is None
    trainer = ScriptedTrainer(CommandReader(redis, lease.token))
    trainer.go_on.set()
    try:
        with meanwhile(trainer.ended, trainer.run):
            yield trainer
    finally:
        lease.release()
