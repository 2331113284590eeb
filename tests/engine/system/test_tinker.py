"""A user's own loop, by the requests of the Tinker SDK, on the real trainer, Redis and engine."""

import math
import signal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.clients.stack import CLIENT_KEY
from tests.support.clients.tinker_stack import READY_WITHIN_S, TinkerStack, tinker_stack
from tests.support.gateway.running import RunningGateway
from tests.support.gateway.tinker_loop import ADAM, SamplingLoop, datum, passed
from tests.support.redis_clients import redis_at
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

IDS, TARGETS = [5, 6, 7, 8], [6, 7, 8, 9]
PASS = datum(IDS, TARGETS, weights=[0.5, 1.0, -1.0, 2.0])
TOLERANCE = 1e-4
"""Nats, float32: of one log-probability, between the trainer and SGLang."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[TinkerStack]:
    with tinker_stack(tmp_path_factory.mktemp("stack"), tiny_model) as running:
        yield running


@pytest.fixture
def loop(running: TinkerStack) -> Iterator[SamplingLoop]:
    with httpx.Client(timeout=300) as http, redis_at(running.stack.redis_url) as redis:
        gateway = RunningGateway(running.stack.gateway_url, engine=None, redis=redis, http=http)  # type: ignore[arg-type]
        yield SamplingLoop(gateway, str(running.model), f"tml-{CLIENT_KEY}")


def scores(loop: SamplingLoop, number: int) -> list[float]:
    made = loop.sample(number, [*IDS, TARGETS[-1]], {"max_tokens": 1}, prompt_logprobs=True)
    found = list(array("f", made.prompt_logprobs))
    assert math.isnan(found[0])
    return found[1:]


def told_of(loop: SamplingLoop, promise: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a promise; None while there is none."""
    told: dict[str, Any] = loop.poll(promise).json()
    return None if told.get("type") == "try_again" else told


def test_a_loop_trains_and_samples_and_survives_the_trainer(running: TinkerStack, loop: SamplingLoop) -> None:
    loop.start()
    before, _ = passed(loop.poll(loop.pass_(1, PASS).json()))
    assert scores(loop, 0) == pytest.approx(before[0], abs=TOLERANCE), "the base model"
    stepped = loop.poll(loop.command("optim_step", 2, adam_params=ADAM | {"learning_rate": 0.01}).json())
    assert stepped.json()["metrics"]["grad_norm"] > 0
    after, _ = passed(loop.poll(loop.pass_(3, PASS).json()))
    assert after != before
    published = loop.poll(loop.command("save_weights_for_sampler", 4, sampling_session_seq_id=7).json())
    loop.sampler = published.json()["sampling_session_id"]
    assert scores(loop, 1) == pytest.approx(after[0], abs=TOLERANCE), "the engine has the step's weights"

    process = psutil.Process(running.stack.processes["trainer_service"].pid)
    process.send_signal(signal.SIGKILL)  # with a gradient that no checkpoint contains
    process.wait(300)
    waits = loop.command("optim_step", 5, adam_params=ADAM).json()
    running.stack.restart("trainer_service")
    wait_until(lambda: not running.stack.waiting_for(), READY_WITHIN_S)
    told = wait_until(lambda: told_of(loop, waits), READY_WITHIN_S)
    assert told is not None
    assert told["metrics"]["grad_norm"] > 0, "the gradient was computed again"
    again, _ = passed(loop.poll(loop.pass_(6, PASS, forward_only=True).json()))
    assert again != after, "the step was made"
