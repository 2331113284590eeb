"""The real SGLang receives tensors in a process group with the trainer: the same weights as from files, exact
versions of tokens, and one whole version after each death on the way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.rollout_server.real_server import REAL_ENGINE, ROOT, Running, real_server
from tests.support.serving import free_port
from tests.support.waiting import wait_until
from trainer_service.storage.policy_store import manifest_sha256

pytestmark = [*REAL_ENGINE, pytest.mark.long]
TIMEOUT_S = 8.0


class SendingTrainer:
    """The trainer's process, which sends tensors."""

    def __init__(self, running: Running, port: int) -> None:
        self.running, self.port = running, port
        self.url = f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        policies = self.running.directory / "run" / "policies"
        policies.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "tests.support.trainer_service.sending",
            str(self.port),
            str(policies),
        ]
        path = os.pathsep.join([str(ROOT), str(ROOT / "queue")])
        with (self.running.directory / "trainer.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log, cwd=ROOT
            )
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/live", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def offer(self, version: int, **interrupted: int) -> None:
        self.running.version(version)
        answer = httpx.post(f"{self.url}/offer/{version}", params=interrupted, timeout=300)
        assert answer.status_code == 200, answer.text

    def holds(self, version: int) -> bool:
        return bool(httpx.get(f"{self.url}/collective/{version}", timeout=120).json()["held"])

    def is_stopped(self) -> bool:
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=300)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Running]:
    settings = {
        "trainer_url": f"http://127.0.0.1:{port}",
        "collective_timeout_s": str(TIMEOUT_S),
        "collective_rest_s": "0",
    }
    directory = tmp_path_factory.mktemp("collective")
    with real_server(directory, tiny_model, collective=True, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def running_trainer(running: Running, port: int) -> Iterator[SendingTrainer]:
    trainer = SendingTrainer(running, port)
    yield trainer
    trainer.end()


@pytest.fixture
def trainer(running_trainer: SendingTrainer) -> SendingTrainer:
    if running_trainer.process is None or running_trainer.process.poll() is not None:
        running_trainer.start()
    return running_trainer


def load(running: Running, trainer: SendingTrainer, version: int, **more: Any) -> dict[str, Any]:
    location = f"{trainer.url}/weights/{version}"
    body = {"version": version, "location": location, **more}
    answer = httpx.post(f"{running.url}/reload", json=body, timeout=120)
    return {"status": answer.status_code, **answer.json()}


def logprobs(running: Running) -> list[list[float]]:
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}
    answer = running.engine.post("/generate", json=body).json()
    return [row[:2] for row in answer["meta_info"]["output_token_logprobs"]]


def has_files(running: Running, version: int) -> bool:
    digest = manifest_sha256(running.version(version))
    url = f"{running.url}/weights/{version}/{digest}/model.safetensors"
    return httpx.get(url, timeout=120).status_code == 200


def test_received_tensors_are_those_of_the_files(running: Running, trainer: SendingTrainer) -> None:
    before = running.checksum()
    trainer.offer(1)
    answer = load(running, trainer, 1)
    assert (answer["status"], answer["version"], answer["fallback"]) == (200, 1, None), answer
    assert running.served() == "1"
    received, told = running.checksum(), logprobs(running)
    assert received != before
    wait_until(lambda: has_files(running, 1))
    running.version(2)
    assert load(running, trainer, 2)["fallback"] is not None  # of version 2, there are only files
    assert running.checksum() not in (before, received)
    answer = load(running, trainer, 1, force=True)
    assert (answer["status"], answer["fallback"]) == (200, None)
    assert (running.checksum(), logprobs(running)) == (received, told)


def test_a_generation_goes_on_with_exact_spans_of_versions(running: Running, trainer: SendingTrainer) -> None:
    trainer.offer(3)
    served = running.served()
    sampling = {"max_new_tokens": 1500, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling}
    with ThreadPoolExecutor(1) as threads:
        asked: Future[httpx.Response] = threads.submit(running.engine.post, "/generate", json=body)
        wait_until(lambda: running.status()["running"] == 1)
        answer = load(running, trainer, 3)
        assert (answer["status"], answer["fallback"]) == (200, None), answer
        spans = asked.result().json()["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [served, "3"], spans
    assert spans[0]["start"] == 0
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == 1500


def test_a_version_that_is_no_snapshot_any_more_is_loaded_from_files(
    running: Running, trainer: SendingTrainer
) -> None:
    trainer.offer(5)
    running.version(4)
    answer = load(running, trainer, 4)
    assert (answer["status"], answer["version"]) == (200, 4), answer
    assert "410" in answer["fallback"]
    assert running.served() == "4"


@pytest.mark.long
def test_an_engine_that_starts_again_boots_what_it_received(
    running: Running, trainer: SendingTrainer
) -> None:
    trainer.offer(6)
    assert load(running, trainer, 6)["fallback"] is None
    checksum, restarts = running.checksum(), running.status()["restarts"]
    os.kill(running.engine_pid(), signal.SIGKILL)
    running.until_ready(restarts + 1)
    assert (running.status()["version"], running.served(), running.checksum()) == (6, "6", checksum)


def interrupted(running: Running, trainer: SendingTrainer, version: int) -> tuple[str, str]:
    """The version and the checksum that are served once a load of `version` was interrupted."""
    served, checksum, restarts = running.served(), running.checksum(), running.status()["restarts"]
    began_at = time.monotonic()
    answer = load(running, trainer, version)
    assert answer["status"] == 503, answer
    assert time.monotonic() - began_at < 4 * TIMEOUT_S
    running.until_ready(restarts + 1)
    assert (running.served(), running.checksum()) == (served, checksum)
    return served, checksum


@pytest.mark.long
def test_a_trainer_that_dies_while_it_sends_leaves_the_former_version(
    running: Running, trainer: SendingTrainer
) -> None:
    trainer.offer(7, at=2, signal=signal.SIGKILL)
    interrupted(running, trainer, 7)
    assert trainer.process is not None
    assert trainer.process.wait(timeout=300) == -signal.SIGKILL
    trainer.start()
    assert load(running, trainer, 7)["status"] == 200  # from files
    assert running.served() == "7"


@pytest.mark.long
def test_a_trainer_that_hangs_while_it_sends_leaves_the_former_version(
    running: Running, trainer: SendingTrainer
) -> None:
    trainer.offer(8, at=2, signal=signal.SIGSTOP)
    try:
        interrupted(running, trainer, 8)
    finally:
        trainer.signal(signal.SIGCONT)
    wait_until(lambda: trainer.holds(8))
    answer = load(running, trainer, 8)
    assert (answer["status"], answer["fallback"]) == (200, None), answer


@pytest.mark.long
def test_an_engine_that_dies_while_it_receives_holds_up_nobody(
    running: Running, trainer: SendingTrainer
) -> None:
    trainer.offer(9, at=2, signal=signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(interrupted, running, trainer, 9)
        wait_until(trainer.is_stopped)
        os.kill(running.engine_pid(), signal.SIGKILL)
        trainer.signal(signal.SIGCONT)
        asked.result()
    began_at = time.monotonic()
    trainer.offer(10)  # takes the next snapshot
    assert time.monotonic() - began_at < TIMEOUT_S
    assert load(running, trainer, 10)["fallback"] is None
    assert running.served() == "10"
