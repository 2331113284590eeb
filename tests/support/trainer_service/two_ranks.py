"""One rank of a small trainer: python -m tests.support.trainer_service.two_ranks FOLDER [--forks]

The folder gets tasks, one after the other, and says when it is over. A task has a policy and a process group
of its own, and with --forks a process as well, which has everything imported already. What is learned is what
the last checkpoint of its run does not know yet, one step a checkpoint; if told so, each of them in two
parts, and what was begun before that is forgotten. In the end rank 0 gives no order for as long as there is a
file `rest`.
"""

import gc
import os
import pickle
import sys
import time
from pathlib import Path

import deepspeed  # noqa: F401 - for those that are forked
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from tests.support.trainer_service.rank_tasks import OVER, Task, Told, place_of, put
from trainer_service.model.policy import DeepSpeedPolicy
from trainer_service.step.ranks import Leader, follow, own_rank
from trainer_service.step.step_request import StepRequest
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

LOOKS_EVERY_S = 0.02


def main(folder: Path, forks: bool) -> None:
    gc.freeze()  # DeepSpeed collects garbage, and what is imported is none
    number = 0
    while (task := next_task(folder, number)) is not None:
        if not forks:
            learn(task, place_of(folder, number))
        elif child := os.fork():
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"task {number} ended with {status}")
        else:
            learn(task, place_of(folder, number))
            return
        number += 1


def learn(task: Task, place: Path) -> None:
    # The launcher has a meeting point for one process group.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(task.port)}
    policy = DeepSpeedPolicy(task.settings)
    if own_rank() > 0:
        follow(policy)
    else:
        put(lead(Leader(policy), task), place / "told.pickle")


def next_task(folder: Path, number: int) -> Task | None:
    path = place_of(folder, number) / "task.pickle"
    while not path.exists():
        if (folder / OVER).exists():
            return None
        time.sleep(LOOKS_EVERY_S)  # another process makes the file, and has no other way to say so
    task: Task = pickle.loads(path.read_bytes())  # noqa: S301 - the test's own
    return task


def lead(leader: Leader, task: Task) -> Told:
    algorithm = task.settings.algorithm
    checkpoints = Checkpoints(task.run / "checkpoints", 2)
    done = (checkpoints.restore(leader) or RunState()).step
    metrics = []
    for step, rows in enumerate(task.steps[done:], done + 1):
        half = len(rows) // 2 if task.in_parts else 0
        if half:
            leader.accumulate(StepRequest(rows, 0, algorithm))
            leader.discard_gradients()
            leader.accumulate(StepRequest(rows[:half], 0, algorithm))
        metrics.append(leader.optimise(StepRequest(rows[half:], 0, algorithm)))
        checkpoints.save(leader, RunState(step=step), [])
    sound = [leader.gradient_is_finite(StepRequest(rows, 0, algorithm)) for rows in task.probes]
    finite = leader.weights_are_finite()
    leader.export(task.run / "weights.safetensors")
    (task.run / "idle").touch()
    while (task.run / "rest").exists():
        time.sleep(LOOKS_EVERY_S)  # as above
    leader.close()
    return Told(metrics, sound, finite)


if __name__ == "__main__":
    words = [
        word for word in sys.argv[1:] if not word.startswith("--local_rank")
    ]  # says DeepSpeed's launcher
    main(Path(words[0]), forks="--forks" in words)
