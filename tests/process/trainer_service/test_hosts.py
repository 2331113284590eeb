"""Ranks on two hosts: started by deepspeed with a hostfile, and as Slurm's srun starts them.

`tests/process/kubernetes` starts them by torchrun.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.trainer_service.host_pair import STARTS_WITHIN_S, HostPair, Launchers, host_pair, launched
from tests.support.trainer_service.hosts import NAMES, why_not
from tests.support.trainer_service.remote_shells import write_remote_shells
from tests.support.trainer_service.slurm import srun_variables
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.step.rank_communication import FAREWELL_S

REASON = why_not()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(REASON is not None, reason=f"two hosts on one machine: {REASON}"),
]
PYTHON = sys.executable
RANK_TIMEOUT_S = 8.0


@pytest.fixture
def pair(tmp_path: Path, model_path: Path) -> Iterator[HostPair]:
    with host_pair(tmp_path) as made:
        made.configure(model_path)
        yield made


def by_deepspeed(pair: HostPair) -> AbstractContextManager[Launchers]:
    """deepspeed --hostfile hostfile --module trainer_service --config weir.yaml"""
    shells, hostfile = pair.folder / "shells", pair.folder / "hostfile"
    if not shells.exists():
        write_remote_shells(shells, pair.hosts)
    hostfile.write_text("".join(f"{name} slots=1\n" for name in NAMES), encoding="utf-8")
    deepspeed = str(Path(PYTHON).with_name("deepspeed"))
    command = [PYTHON, deepspeed, "--hostfile", str(hostfile), "--module", "trainer_service", *pair.words]
    path = os.pathsep.join([str(shells), os.environ["PATH"]])
    return launched([command], [{"PATH": path}], pair.folder / "log")


def by_srun(pair: HostPair) -> AbstractContextManager[Launchers]:
    """srun --nodes 2 --ntasks-per-node 1 python -m trainer_service --config weir.yaml"""
    task = [PYTHON, "-m", "trainer_service", *pair.words]
    variables = [srun_variables(NAMES, number, job=1234567) for number in range(2)]
    return launched([host.enter(*task) for host in pair.hosts], variables, pair.folder / "log")


def test_deepspeed_starts_and_restarts_the_ranks_of_a_hostfile(pair: HostPair) -> None:
    with by_deepspeed(pair) as launchers:
        pair.train(launchers)
        pair.ranks()[0].send_signal(signal.SIGTERM)
        assert launchers.wait(PATIENCE_S) == [0]
    assert pair.saved_step() == 1
    with by_deepspeed(pair) as launchers:
        pair.train(launchers)
        wait_until(lambda: pair.saved_step() == 2)


def test_ranks_of_srun_end_when_the_network_is_gone_and_go_on_when_it_is_back(
    pair: HostPair, model_path: Path
) -> None:
    pair.configure(model_path, rank_timeout_s=RANK_TIMEOUT_S)
    with by_srun(pair) as launchers:
        pair.train(launchers)
        pair.hosts[1].cut()
        assert launchers.wait(RANK_TIMEOUT_S + FAREWELL_S + PATIENCE_S) == [1, 1]
    pair.hosts[1].restore()
    with by_srun(pair) as launchers:
        pair.train(launchers)
        wait_until(lambda: pair.saved_step() == 2)


def test_hosts_that_do_not_share_the_checkpoints_are_refused(pair: HostPair) -> None:
    pair.checkpoints.mkdir()
    pair.hosts[1].run("mount", "-t", "tmpfs", "none", str(pair.checkpoints))
    with by_srun(pair) as launchers:
        assert launchers.wait(STARTS_WITHIN_S) == [1, 0]
    said = (pair.folder / "log").read_text(encoding="utf-8")
    assert f"trainer.checkpoint_dir: ranks [1] do not see rank 0's directory {pair.checkpoints}" in said
