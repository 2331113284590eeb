"""Ranks find their place in the variables of a launcher or of srun, and refuse half of them."""

import re

import pytest

from tests.support.trainer_service.slurm import srun_variables
from trainer_service.step.communication.launch import first_host, joined

LAUNCHED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29500",
}


def test_a_process_without_variables_is_the_only_rank() -> None:
    assert joined({"MASTER_ADDR": "gpu07", "LOCAL_RANK": "0"}, 0) == {}


def test_a_launcher_says_which_rank_this_is_also_below_srun() -> None:
    assert joined(LAUNCHED, 8) == LAUNCHED
    assert joined(srun_variables(["gpu07", "gpu08"], 0, job=7) | LAUNCHED, 8) == LAUNCHED


def test_a_task_of_srun_is_a_rank() -> None:
    variables = srun_variables(["gpu07", "gpu08"], 3, job=1234567, per_host=2)
    assert variables["SLURM_STEP_NODELIST"] == "gpu[07-08]"
    assert joined(variables, 2) == LAUNCHED | {"MASTER_PORT": "19567"}
    assert joined(variables | {"MASTER_ADDR": "ib7", "MASTER_PORT": "29"}, 2) == LAUNCHED | {
        "MASTER_ADDR": "ib7",
        "MASTER_PORT": "29",
    }


def test_a_task_that_sees_its_own_gpu_alone_uses_that() -> None:
    variables = srun_variables(["gpu07", "gpu08"], 3, job=7, per_host=2)
    assert joined(variables, 1)["LOCAL_RANK"] == "0"
    assert joined(variables, 0)["LOCAL_RANK"] == "1"


def test_a_batch_script_and_a_step_of_one_task_are_one_rank() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert joined(batch, 8) == {}
    assert joined(srun_variables(["gpu07"], 0, job=7), 8) == {}


@pytest.mark.parametrize("name", LAUNCHED)
def test_half_of_a_launchers_variables_is_refused(name: str) -> None:
    given = {other: value for other, value in LAUNCHED.items() if other != name}
    with pytest.raises(SystemExit, match=rf"without {name}: start it by torchrun, deepspeed or srun"):
        joined(given, 8)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"])
def test_half_of_the_variables_of_srun_is_refused(name: str) -> None:
    given = srun_variables(["gpu07", "gpu08"], 0, job=7)
    del given[name]
    with pytest.raises(SystemExit, match=re.escape(f"without {name}: ")):
        joined(given, 8)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[07-09,12],login3", "gpu07"),
        ("rack[2,4]-n[01-16]", "rack2-n01"),
        ("x[5]-ib,x7-ib", "x5-ib"),
    ],
)
def test_the_first_host_of_a_list_of_slurm(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
