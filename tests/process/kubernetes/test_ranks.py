"""The pods of the fleet's Job train together: their command runs on two hosts."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kubernetes.pods import environment, pods_of
from tests.support.kubernetes.rendered import Object, named
from tests.support.trainer_service.host_pair import HostPair, host_pair, launched
from tests.support.trainer_service.hosts import NAMES, why_not
from tests.support.waiting import PATIENCE_S, wait_until

REASON = why_not()
FIRST = "trainer-0.trainer-ranks"
"""The name of the Job's first pod."""


@pytest.fixture
def pair(tmp_path: Path, tiny_model: Path) -> Iterator[HostPair]:
    with host_pair(tmp_path) as made:
        made.configure(tiny_model)
        yield made


def test_nodes_and_gpus_are_counted_alike_everywhere(overlays: dict[str, list[Object]]) -> None:
    job = named(overlays["fleet"], "Job", "trainer")["spec"]
    pod = pods_of(overlays["fleet"])["trainer"]
    words = dict(word.removeprefix("--").split("=") for word in pod.main["args"] if "=" in word)
    assert {job["completions"], job["parallelism"], int(words["nnodes"])} == {2}
    assert int(words["nproc-per-node"]) == pod.main["resources"]["limits"]["nvidia.com/gpu"]
    assert words["rdzv-endpoint"] == f"trainer-0.{pod.spec['subdomain']}:29400"
    assert f"trainer-0.{pod.spec['subdomain']}" == FIRST


def test_a_trainer_that_was_ended_comes_back(overlays: dict[str, list[Object]]) -> None:
    job = named(overlays["fleet"], "Job", "trainer")["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert job["backoffLimit"] == 2**31 - 1
    assert job["podReplacementPolicy"] == "Failed"  # never two pods of one index


@pytest.mark.long
@pytest.mark.skipif(REASON is not None, reason=f"two hosts on one machine: {REASON}")
def test_the_command_of_the_job_starts_a_trainer_over_two_hosts(
    pair: HostPair, overlays: dict[str, list[Object]]
) -> None:
    main = pods_of(overlays["fleet"])["trainer"].main
    given = [*main["command"], *main["args"]]
    assert given[0] == "python"
    assert len([word for word in given if FIRST in word]) == 1
    words = [word.replace(FIRST, NAMES[0]) for word in given[1:]]
    words[words.index("--nproc-per-node=8")] = "--nproc-per-node=1"
    own = {name: value for name, value in environment(main).items() if not name.startswith("WEIR_")}
    commands = [host.enter(sys.executable, *words, *pair.words) for host in pair.hosts]
    with launched(commands, [own] * 2, pair.folder / "log") as launchers:
        pair.train(launchers)
        before = pair.ranks()
        before[1].kill()
        pair.train(launchers)
        assert not set(before) & set(pair.ranks())
        wait_until(lambda: pair.saved_step() == 2)
        # The kubelet ends a pod by a signal to torchrun. Not 0: the Job has to make the pod again.
        for process in launchers.processes:
            process.send_signal(signal.SIGTERM)
        assert 0 not in launchers.wait(PATIENCE_S + 60)
