"""The ranks of a small trainer: python -m tests.support.trainer_service.two_ranks FOLDER [--forks]

A test puts tasks into the folder, one after the other. At the end it adds the file `over`.
Each task has its own policy and process group. With --forks, this process has imported everything, and forks
two ranks for each task, or processes of `trainer_service`. Otherwise this process is one rank, which a
launcher has started. A task trains the steps that the last checkpoint of its run lacks, and saves a
checkpoint after each. With `memory: shared`, the states of all ranks are on the host between steps. With
`in_parts` it first accumulates and discards gradients, and then learns each step in two parts. At the end
rank 0 sends no command to rank 1 as long as the file `rest` exists. A task that publishes writes versions
meanwhile, and no `weights.safetensors`.
"""

import gc
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - forked processes need all of these
import peft  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from safetensors.torch import save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import trainer_service.__main__
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.command_harness import CommandHarness
from tests.support.trainer_service.command_log import MemoryCommandLog
from tests.support.trainer_service.publishing_ranks import (
    CountedPolicy,
    Publications,
    hinder_writes,
    note_synced,
)
from tests.support.trainer_service.rank_tasks import (
    LOG,
    OVER,
    SYNCED,
    Program,
    Task,
    Told,
    ended_path,
    held_path,
    place_of,
    put,
    ranks_path,
)
from trainer_service.model.trained_models import Models
from trainer_service.step.rank_communication import own_rank
from trainer_service.step.ranks import DistributedPolicy, PolicyRank, follow
from trainer_service.step.step_parts import StepRequest, TurnRecord
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

LOOKS_EVERY_S = 0.02


@dataclass
class Job:
    """The forked processes of a task."""

    place: Path
    processes: Sequence[int]
    may_fail: bool
    statuses: dict[int, int] = field(default_factory=dict)
    """How those that have ended did so."""

    def look(self) -> bool:
        """Whether all have ended. Ends this process if one failed and may not."""
        for process in self.processes:
            if process not in self.statuses and (found := os.waitpid(process, os.WNOHANG))[0]:
                self.statuses[process] = os.waitstatus_to_exitcode(found[1])
        if len(self.statuses) < len(self.processes):
            return False
        put([self.statuses[each] for each in self.processes], ended_path(self.place))
        if any(self.statuses.values()) and not self.may_fail:
            sys.exit(f"a rank failed in {self.place.name}")
        return True


def main(folder: Path, forks: bool) -> None:
    get_checkpoint_conversion_mapping("qwen3")  # makes those of all models
    gc.freeze()  # the garbage collector, which DeepSpeed calls, then skips the imported modules
    jobs: list[Job] = []
    number = 0
    while True:
        jobs = [job for job in jobs if not job.look()]
        place = place_of(folder, number)
        if (path := place / "task.pickle").exists():
            task: Task | Sequence[Program] = pickle.loads(path.read_bytes())  # noqa: S301 - the test's own
            number += 1
            if forks:
                jobs.append(job_of(task, place))
            elif isinstance(task, Task):
                learn(task, place)
        elif not jobs and (folder / OVER).exists():
            return
        time.sleep(LOOKS_EVERY_S)  # another process makes the file, and nothing else announces it


def job_of(task: Task | Sequence[Program], place: Path) -> Job:
    if isinstance(task, Task):
        works = [partial(be_rank, rank, task, place) for rank in range(2)]
        return Job(place, forked(works, place), task.may_fail)
    return Job(place, forked([partial(be_trainer, each) for each in task], place), may_fail=True)


def forked(works: Sequence[Callable[[], None]], place: Path) -> list[int]:
    """Returns the ids of processes that do these works."""
    processes = []
    for work in works:
        if not (process := os.fork()):
            end_at_once(work)
        processes.append(process)
    put(processes, ranks_path(place))
    return processes


def be_rank(rank: int, task: Task, place: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    learn(task, place)


def be_trainer(program: Program) -> None:
    os.environ |= program.environment
    with program.log.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    trainer_service.__main__.main(program.arguments)


def end_at_once(work: Callable[[], None]) -> NoReturn:
    """End this forked process with its work, as Python ends a process, but without freeing any memory: that
    would copy all of it."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def learn(task: Task, place: Path) -> None:
    # The launcher's store serves one process group only; each task needs its own.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(task.port)}
    if task.script:
        follow_script(task, place)
        return
    policy = CountedPolicy(task.settings)
    if not task.shares:
        task.directory_of(own_rank()).mkdir()
        os.chdir(task.directory_of(own_rank()))
    if own_rank() > 0:
        hinder_writes(task.run)
        note_synced(task.run / SYNCED)
        follow(PolicyRank(policy))
    else:
        told = lead(DistributedPolicy(policy, task.policies if task.publishes else None), task)
        put(told, place / "told.pickle")
    put(policy.held_bytes, held_path(place, own_rank()))


def follow_script(task: Task, place: Path) -> None:
    """Carry out the task's commands, and save. Then write the weights of each model."""
    if own_rank() > 0:
        follow(Models(task.settings))
    else:
        path = task.run / LOG
        log = pickle.loads(path.read_bytes()) if path.exists() else MemoryCommandLog()  # noqa: S301 - the test's own
        harness = CommandHarness(task.run, task.settings, log)
        for model_id, command in task.script:
            harness.send(model_id, command)
        for model_id in harness.trainer.executor.model_ids:
            save_file(dict(harness.weights(model_id)), task.run / f"{model_id}.safetensors")
        harness.stop()
        put(log, path)
        harness.ranks.close()
        put(Told([], [], finite=True), place / "told.pickle")
    put(0, held_path(place, own_rank()))


def lead(leader: DistributedPolicy, task: Task) -> Told:
    algorithm = task.settings.algorithm
    checkpoints = Checkpoints(task.run / "checkpoints", 2)
    done = (checkpoints.restore(leader) or RunState()).step
    publications = Publications(leader, task)
    publications.after(done)
    metrics: list[dict[str, float]] = []
    records: list[Sequence[TurnRecord]] = []
    for step, rows in enumerate(task.steps[done:], done + 1):
        half = len(rows) // 2 if task.in_parts else 0
        if task.settings.memory == "shared":
            leader.reload_states()
        if half:
            leader.accumulate(StepRequest(rows, 0, algorithm))
            leader.discard_gradients()
            leader.accumulate(StepRequest(rows[:half], 0, algorithm, recorded="all"))
        metrics.append(leader.optimise(StepRequest(rows[half:], 0, algorithm, recorded="all")))
        records.append(leader.records)
        if (every := algorithm.kl.reference_every_steps) and step % every == 0:
            leader.move_reference()
        if task.settings.memory == "shared":
            leader.offload_states()
        saved_checkpoint(checkpoints, leader, RunState(step=step))
        publications.after(step)
    publications.wait()
    sound = [leader.gradient_is_finite(StepRequest(rows, 0, algorithm)) for rows in task.probes]
    finite = leader.weights_are_finite()
    if not task.publishes:
        weights = {tensor.name: tensor.value for tensor in leader.snapshot().tensors}
        save_file(weights, task.run / "weights.safetensors")
    (task.run / "idle").touch()
    while (task.run / "rest").exists():
        time.sleep(LOOKS_EVERY_S)  # the test removes the file, and nothing else announces it
    leader.close()
    return Told(metrics, sound, finite, publications.refusals, records)


if __name__ == "__main__":
    words = [
        word for word in sys.argv[1:] if not word.startswith("--local_rank")
    ]  # DeepSpeed's launcher adds --local_rank
    main(Path(words[0]), forks="--forks" in words)
