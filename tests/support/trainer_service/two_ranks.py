"""The ranks of a small trainer: python -m tests.support.trainer_service.two_ranks FOLDER [--forks]

A test puts tasks into the folder, one after the other. At the end it adds the file `over`.
Each task has its own policy and process group. With --forks, this process has imported everything, and forks
two ranks for each task. Otherwise this process is one rank, which a launcher has started. A task trains the
steps that the last checkpoint of its run lacks, and saves a checkpoint after each. With `memory: shared`, the
states of all ranks are on the host between steps. With `in_parts` it first accumulates and discards
gradients, and then learns each step in two parts. At the end rank 0 sends no command to rank 1 as long as the
file `rest` exists. A task that publishes writes versions meanwhile, and no `weights.safetensors`.
"""

import gc
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - forked processes need all of these
import peft  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from safetensors.torch import save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

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
    Task,
    Told,
    ended_path,
    held_path,
    place_of,
    put,
    ranks_path,
)
from trainer_service.commands.ranks import follow_models
from trainer_service.model.trained.models import Models
from trainer_service.step.communication.launch import own_rank
from trainer_service.step.ranks import DistributedPolicy, follow
from trainer_service.step.step_request import StepRequest
from trainer_service.step.token_records import TurnRecord
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

LOOKS_EVERY_S = 0.02


def main(folder: Path, forks: bool) -> None:
    get_checkpoint_conversion_mapping("qwen3")  # makes those of all models
    gc.freeze()  # the garbage collector, which DeepSpeed calls, then skips the imported modules
    number = 0
    while (task := next_task(folder, number)) is not None:
        place = place_of(folder, number)
        if not forks:
            learn(task, place)
        elif any(fork_ranks(task, place)) and not task.may_fail:
            sys.exit(f"a rank failed in task {number}")
        number += 1


def fork_ranks(task: Task, place: Path) -> list[int]:
    """Returns the exit statuses of the ranks."""
    ranks = []
    for rank in range(2):
        if not (process := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1"}
            end_at_once(partial(learn, task, place))
        ranks.append(process)
    put(ranks, ranks_path(place))
    ended = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    put(ended, ended_path(place))
    return ended


def end_at_once(work: Callable[[], None]) -> NoReturn:
    """End this forked process with its work. An orderly end would copy all memory that it shares."""
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
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
        follow(policy)
    else:
        told = lead(DistributedPolicy(policy, task.policies if task.publishes else None), task)
        put(told, place / "told.pickle")
    put(policy.held_bytes, held_path(place, own_rank()))


def follow_script(task: Task, place: Path) -> None:
    """Carry out the task's commands, and save. Then write the weights of each model."""
    if own_rank() > 0:
        follow_models(Models(task.settings))
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


def next_task(folder: Path, number: int) -> Task | None:
    path = place_of(folder, number) / "task.pickle"
    while not path.exists():
        if (folder / OVER).exists():
            return None
        time.sleep(LOOKS_EVERY_S)  # another process makes the file, and nothing else announces it
    task: Task = pickle.loads(path.read_bytes())  # noqa: S301 - the test's own
    return task


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
