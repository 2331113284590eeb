"""Ranks find their place in the variables of a launcher or of srun, and refuse half of them."""

import re

import pytest

from tests.support.trainer_service.slurm import srun_variables
from trainer_service.step.rank_communication import first_host, joined

LAUNCHED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}


BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TASK = srun_variables(["gpu07", "gpu08"], 3, job=1234567, per_host=2)
OTHER = {"MASTER_ADDR": "ib7", "MASTER_PORT": "29"}


@pytest.mark.parametrize(
    ("variables", "gpus", "place"),
    [
        pytest.param({"MASTER_ADDR": "gpu07", "LOCAL_RANK": "0"}, 0, {}, id="no launcher"),
        pytest.param(LAUNCHED, 8, LAUNCHED, id="a launcher"),
        pytest.param(TASK | LAUNCHED, 8, LAUNCHED, id="a launcher below srun"),
        pytest.param(TASK, 2, LAUNCHED | {"MASTER_PORT": "19567"}, id="srun"),
        pytest.param(TASK | OTHER, 2, LAUNCHED | OTHER, id="srun with an address"),
        pytest.param(TASK | OTHER, 1, LAUNCHED | OTHER | {"LOCAL_RANK": "0"}, id="one GPU is visible"),
        pytest.param(TASK | OTHER, 0, LAUNCHED | OTHER, id="no GPU"),
        pytest.param(BATCH, 8, {}, id="a batch script"),
        pytest.param(srun_variables(["gpu07"], 0, job=7), 8, {}, id="a step of one task"),
    ],
)
def test_a_process_finds_its_place_in_the_variables(
    variables: dict[str, str], gpus: int, place: dict[str, str]
) -> None:
    assert TASK["SLURM_STEP_NODELIST"] == "gpu[07-08]"
    assert joined(variables, gpus) == place


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
