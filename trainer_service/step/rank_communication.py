"""How the ranks of a trainer find each other, speak to each other, and notice that one is gone.

torchrun, deepspeed ─▶ RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT ◀─ joined ◀─ SLURM_… ◀─ srun
main threads      CommandChannel: rank 0 broadcasts calls over Gloo on the CPU, even if GPUs train
background        RankThreads: rank 0 gives orders to a thread on every rank, and gets what each answers
watch             RankWatch: all ranks answer every quarter of the timeout, or each process ends by itself

The background threads have process groups of their own, because the main threads may be in a collective of
the training meanwhile. If a rank dies, its connections break: rank 0's thread raises, and the trainer ends.
The ranks wait for days for the next command. If a host loses power or its network, no connection breaks: the
other hosts' ranks would wait for ever, and keep their GPUs. So there is the watch.

All ranks write a version or a checkpoint together, in the background: each its share, or its own states.

a version     rank 0    publisher's thread  directory ─┬─▶ own files ──┬─▶ all files ─▶ index, manifest, …
              rank 1 …  a thread of its own ◀──────────┴─▶ their files ┘
a checkpoint  main threads  CopyStates ─▶ every rank's host memory                       (the training waits)
              background    directory ─▶ every rank's files, synced on its host ─▶ state.json, CURRENT
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Event, Thread
from typing import Generic, NamedTuple, TypeVar

import torch

from rollout_queue import clock
from rollout_queue.contract.published_policy import FileSpec
from trainer_service.model.checkpoint_layout import LAUNCHER_VARIABLES
from trainer_service.model.host_copies import FILE_BYTES, StateCopy, WeightSnapshot
from trainer_service.storage.durable_files import sync_tree

logger = logging.getLogger(__name__)

Command = TypeVar("Command")

COMMAND_TIMEOUT = timedelta(days=365)
"""The longest time between two commands. A trainer may wait for agents for days, but the process group that
trains has a timeout of minutes."""


class CommandChannel(Generic[Command]):
    """A process group for one thread of each rank. All ranks must make their channels in the same order."""

    def __init__(self, ranks: int) -> None:
        self._group = (
            torch.distributed.new_group(backend="gloo", timeout=COMMAND_TIMEOUT) if ranks > 1 else None
        )

    def send(self, command: Command | None) -> None:
        """Send a command. None tells the other ranks to end."""
        if self._group is not None:
            torch.distributed.broadcast_object_list([command], src=0, group=self._group)

    def receive(self) -> Command | None:
        """Wait for the next command. Raises RuntimeError if rank 0 is gone."""
        commands: list[Command | None] = [None]
        torch.distributed.broadcast_object_list(commands, src=0, group=self._group)
        return commands[0]

    def wait_for_all(self) -> None:
        """Wait until every rank has called this."""
        if self._group is not None:
            torch.distributed.barrier(group=self._group)

    def close(self) -> None:
        """Destroy all groups. A process that exits while Gloo's threads still run is aborted."""
        if self._group is not None:
            self.wait_for_all()
            torch.distributed.destroy_process_group()


LONGEST_ORDER = timedelta(minutes=30)
"""How long rank 0 waits for the other ranks after its own part is done, which is as large."""
Answer = TypeVar("Answer")
Order = TypeVar("Order")


class RankThreads(Generic[Order, Answer]):
    """Rank 0's side. One thread at a time calls it. All ranks must make their sides in the same order."""

    def __init__(self, ranks: int) -> None:
        self._alone = ranks == 1
        self._orders = CommandChannel[Order](ranks)
        self._answers = _Answers(ranks)

    def carry_out(self, order: Order, own: Callable[[], Answer]) -> list[Answer]:
        """Have every rank carry out `order`; `own` does rank 0's part. Returns the answers of all ranks when
        no rank works on it any more. Raises the OSError of a rank whose disk refuses, and RuntimeError if a
        rank failed otherwise, or is gone. A single rank raises what `own` raises."""
        if self._alone:
            return [own()]
        self._orders.send(order)
        answers: list[Answer] = []
        for answer in self._answers.gather(_attempt(own)):
            if isinstance(answer, Exception):
                raise answer
            answers.append(answer)
        return answers

    def close(self) -> None:
        """End the threads of the other ranks."""
        self._orders.send(None)


class RankThread(Generic[Order, Answer]):
    """The side of another rank: a thread that carries out rank 0's orders."""

    def __init__(self, ranks: int, name: str, carry_out: Callable[[Order], Answer]) -> None:
        self._carry_out = carry_out
        self._orders = CommandChannel[Order](ranks)
        self._answers = _Answers(ranks)
        # A daemon, because it cannot be told to end if rank 0 is gone.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until rank 0 has ended this thread."""
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.receive()) is not None:
            self._answers.gather(_attempt(lambda order=order: self._carry_out(order)))  # type: ignore[misc]


def _attempt(work: Callable[[], Answer]) -> Answer | Exception:
    """What `work` returns or raises, in a form that travels to rank 0."""
    try:
        return work()
    except OSError as error:
        logger.warning("this rank's disk refuses: %s", error)
        return error
    except Exception as error:
        logger.exception("this rank failed in the background")
        return RuntimeError(f"a rank failed in the background: {error!r}")


class _Answers:
    """Brings one value from each rank to rank 0."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._group = (
            torch.distributed.new_group(backend="gloo", timeout=LONGEST_ORDER) if ranks > 1 else None
        )

    def gather(self, value: Answer) -> list[Answer]:
        """The values of all ranks on rank 0, and nothing on the others. Raises RuntimeError if a rank is gone
        or takes too long."""
        if self._group is None:
            return [value]
        on_rank_0 = torch.distributed.get_rank() == 0
        values: list[Answer] | None = [value] * self._ranks if on_rank_0 else None
        try:
            torch.distributed.gather_object(value, values, dst=0, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(f"a rank is gone, or had no answer for {LONGEST_ORDER}") from error
        return values or []


FAREWELL_S = 5.0
"""How long a main thread that has seen the same failure may take to report it and to end the process."""


class RankWatch:
    """A thread of each rank, with a process group of its own. All ranks must make theirs together."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self._over = Event()
        self._thread = Thread(target=copy_context().run, args=(self._watch,), name="rank-watch", daemon=True)
        if ranks > 1:
            self._leads = torch.distributed.get_rank() == 0
            answers_within = timedelta(seconds=timeout_s * 3 / 4)
            self._group = torch.distributed.new_group(backend="gloo", timeout=answers_within)
            self._thread.start()

    def close(self) -> None:
        """Rank 0 ends the threads of all ranks; another rank waits until rank 0 has."""
        if self._ranks > 1:
            self._over.set()
            self._thread.join()

    def _watch(self) -> None:
        try:
            while self._all_go_on():
                if self._leads:
                    clock.wait(self._over, self._timeout_s / 4)
        except RuntimeError as error:
            logger.error("ends: a rank is gone, or was silent for %g s: %s", self._timeout_s, error)
            clock.pause(FAREWELL_S)
            os._exit(1)

    def _all_go_on(self) -> bool:
        """Whether rank 0 has not closed its watch. Raises RuntimeError if a rank does not answer."""
        going = torch.tensor(0 if self._leads and self._over.is_set() else 1)
        torch.distributed.all_reduce(going, group=self._group)
        return int(going) == self._ranks


FIRST_PORT, PORTS = 15_000, 10_000
"""The ports of jobs without MASTER_PORT. They lie below those that Linux gives to outgoing connections."""
TASKS = "SLURM_STEP_NUM_TASKS"
"""Only srun sets variables of a step. A batch script has SLURM_PROCID and SLURM_NTASKS, but is no task."""


def joined(environment: Mapping[str, str], gpus: int) -> dict[str, str]:
    """The variables that make this process one of several ranks; empty if it is the only one. `gpus` is the
    number that this process sees: Slurm may give each task its own.

    Raises SystemExit if variables are missing.
    """
    given = {name: environment[name] for name in LAUNCHER_VARIABLES if environment.get(name)}
    if "RANK" in given or "WORLD_SIZE" in given:
        return _complete(given, LAUNCHER_VARIABLES, "a launcher")
    if int(environment.get(TASKS) or 1) == 1:
        return {}
    names = (TASKS, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    step = _complete({name: environment[name] for name in names if environment.get(name)}, names, "srun")
    local = int(step["SLURM_LOCALID"])
    return {
        "RANK": step["SLURM_PROCID"],
        "WORLD_SIZE": step[TASKS],
        "LOCAL_RANK": str(local % gpus if gpus else local),
        "MASTER_ADDR": given.get("MASTER_ADDR") or first_host(step["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": given.get("MASTER_PORT") or str(FIRST_PORT + int(step["SLURM_JOB_ID"]) % PORTS),
    }


def first_host(hosts: str) -> str:
    """The first name of a list as Slurm writes it: gpu[07-09,12],login3 begins with gpu07."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", hosts).split(",")[0]


def _complete(given: dict[str, str], names: tuple[str, ...], setter: str) -> dict[str, str]:
    if missing := [name for name in names if name not in given]:
        raise SystemExit(
            f"the environment of this process is that of one of several ranks, but without "
            f"{', '.join(missing)}: start it by torchrun, deepspeed or srun, or unset what {setter} has set "
            f"({', '.join(given)}) to start a single rank"
        )
    return given


def own_rank() -> int:
    """This process's rank, from the variable RANK; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def own_ranks() -> int:
    """The number of ranks, from the variable WORLD_SIZE; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


NO_COPY = StateCopy({})


@dataclass(frozen=True)
class SpreadCopy:
    """The copies of all ranks, of which rank 0 has its own."""

    own: StateCopy
    ranks: RankThreads[Path, None]

    def write(self, directory: Path) -> None:
        """Have every rank write its files. Returns when they are durable. Raises OSError if a rank's disk
        refuses, and RuntimeError if a rank failed otherwise, or is gone."""
        self.ranks.carry_out(directory.absolute(), partial(_write, self.own, directory))


class CopyWriter:
    """The side of another rank: a thread that writes this rank's copy whenever rank 0 asks for it."""

    def __init__(self, ranks: int) -> None:
        self.copy = NO_COPY
        """The last copy. Rank 0 takes no further one before all have written it."""
        self._thread = RankThread[Path, None](ranks, "copy-writer", lambda path: _write(self.copy, path))

    def forget(self) -> None:
        """Free the last copy. To be called before the next one is taken, so that only one is in memory."""
        self.copy = NO_COPY

    def join(self) -> None:
        self._thread.join()


def _write(copy: StateCopy, directory: Path) -> None:
    copy.write(directory)
    directory.mkdir(parents=True, exist_ok=True)  # a copy without states has made none
    sync_tree(directory)  # rank 0 cannot sync what a rank on another host has written to a common disk


class WriteShare(NamedTuple):
    """Write the share of the last snapshot."""

    directory: Path
    file_bytes: int


class LookFor(NamedTuple):
    """Say whether this file exists, in a directory where this rank may write."""

    path: Path


class ShareWriters:
    """Rank 0's side: has every rank write its share."""

    def __init__(self, ranks: int) -> None:
        self._ranks = RankThreads[WriteShare | LookFor, bool | list[FileSpec]](ranks)

    def without(self, directory: Path) -> list[int]:
        """The ranks that do not see the files that rank 0 makes in `directory`, or may not write there."""
        directory.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=directory.absolute(), prefix=".rank-0-") as file:
            seen = self._ranks.carry_out(LookFor(Path(file.name)), lambda: True)
        return [rank for rank, sees in enumerate(seen) if not sees]

    def write(self, share: WeightSnapshot, directory: Path, file_bytes: int) -> list[FileSpec]:
        """Have every rank write its share into `directory`; `share` is rank 0's. Returns when no rank writes
        any more. Raises the OSError of a rank whose disk refuses, and RuntimeError if a rank is gone."""
        order = WriteShare(directory.absolute(), file_bytes)
        answers = self._ranks.carry_out(order, partial(share.write_share, directory, file_bytes))
        return [spec for specs in answers if isinstance(specs, list) for spec in specs]

    def close(self) -> None:
        self._ranks.close()


@dataclass(frozen=True)
class SpreadSnapshot(WeightSnapshot):
    """Rank 0's share of the weights. `write` has every rank write its own share."""

    writers: ShareWriters = field(kw_only=True)

    def write(self, directory: Path, file_bytes: int = FILE_BYTES) -> list[FileSpec]:
        return self.indexed(directory, self.writers.write(self, directory, file_bytes))


class ShareWriter:
    """The side of another rank: a thread that writes this rank's share whenever rank 0 asks for it."""

    def __init__(self, ranks: int) -> None:
        self.snapshot = WeightSnapshot([])
        """The last snapshot. Rank 0 asks for it only when all ranks have taken it, and takes no further one
        before all have written it."""
        self._thread = RankThread[WriteShare | LookFor, bool | list[FileSpec]](
            ranks, "share-writer", self._carry_out
        )

    def join(self) -> None:
        self._thread.join()

    def _carry_out(self, order: WriteShare | LookFor) -> bool | list[FileSpec]:
        match order:
            case LookFor(path):
                return os.access(path, os.F_OK) and os.access(path.parent, os.W_OK)
            case WriteShare(directory, file_bytes):
                return self._write(directory, file_bytes)

    def _write(self, directory: Path, file_bytes: int) -> list[FileSpec]:
        specs = self.snapshot.write_share(directory, file_bytes)
        for spec in specs:  # rank 0, on another host, can sync only what it wrote itself
            with (directory / spec.name).open("rb") as file:
                os.fsync(file.fileno())
        return specs
