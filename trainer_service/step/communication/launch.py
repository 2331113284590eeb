"""Which of several ranks this process is: from a launcher's variables, or from those of Slurm's srun.

torchrun, deepspeed ─▶ RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT ◀─ joined ◀─ SLURM_… ◀─ srun
"""

import os
import re
from collections.abc import Mapping

from trainer_service.model.sharding.universal import LAUNCHER_VARIABLES

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
