"""The variables that Slurm's srun gives to a task, as far as Weir or its libraries could look at them.

Names and meanings are those of `man srun`, OUTPUT ENVIRONMENT VARIABLES. A batch script has some of
them, too; only a task of srun has those of a step.
"""

from collections.abc import Sequence


def srun_variables(hosts: Sequence[str], task: int, job: int, per_host: int = 1) -> dict[str, str]:
    """Those of one task of `srun --ntasks-per-node per_host`. Tasks fill one host after the other (`block`,
    which is the default). `hosts` have a common prefix and consecutive numbers."""
    node, local = divmod(task, per_host)
    tasks, counts = str(len(hosts) * per_host), f"{per_host}(x{len(hosts)})" if len(hosts) > 1 else "1"
    names = _folded(hosts)
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOBID": str(job),
        "SLURM_JOB_NODELIST": names,
        "SLURM_JOB_NUM_NODES": str(len(hosts)),
        "SLURM_NODELIST": names,
        "SLURM_NNODES": str(len(hosts)),
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_TASKS_PER_NODE": counts,
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": names,
        "SLURM_STEP_NUM_NODES": str(len(hosts)),
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",  # where srun runs: perhaps a login node, never relied on
        "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": hosts[node],
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(local),
        "SLURM_GTIDS": ",".join(str(node * per_host + each) for each in range(per_host)),
    }


def _folded(hosts: Sequence[str]) -> str:
    """The list of hosts as Slurm writes it."""
    if len(hosts) == 1:
        return hosts[0]
    prefix = hosts[0].rstrip("0123456789")
    return f"{prefix}[{hosts[0].removeprefix(prefix)}-{hosts[-1].removeprefix(prefix)}]"
