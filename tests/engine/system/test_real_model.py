"""A model that others have trained, on the stack with its defaults: it answers, is trained, and is pushed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.system.real_system import CLIENT_KEY, ENGINE_PYTHON, System, running_system, stack_settings
from tests.support.waiting import wait_until
from weir.stack.stack import Stack

MODEL = Path("run/models/smollm2")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (MODEL / "config.json").exists(), reason="no SmolLM2: `make test-engine` makes it"
    ),
]

ADMIN_KEY = "system-admin"
WORDS = ("sea", "sun", "rain", "bread", "music", "snow", "glass", "trees", "cats")
SENTENCES = [f"Write one sentence about {word}." for word in WORDS]
GROUP = 16


@pytest.fixture(params=[{}, {"lora": {"rank": 16}, "transport": "adapter"}], ids=["all weights", "adapters"])
def real(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[System]:
    trainer: dict[str, Any] = request.param
    server: dict[str, Any] = {"lora": {"max_rank": 16, "max_loaded": 8}} if trainer else {}
    services = {"trainer": trainer, "rollout_server": server}
    settings = stack_settings(
        tmp_path, MODEL, CLIENT_KEY, ADMIN_KEY, engine_python=ENGINE_PYTHON, services=services
    )
    with running_system(settings) as system:
        yield system


def memory_gb(system: System) -> dict[str, float]:
    """What the processes of each service take; pages that processes share count once."""
    assert isinstance(system.stack, Stack)
    found = {}
    for name, service in system.stack.processes.items():
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(service.pid)
            family = (parent, *parent.children(recursive=True))
            found[name] = sum(each.memory_full_info().pss for each in family) / 1e9
    return found


def test_it_speaks_is_trained_and_pushed_within_the_memory_of_a_laptop(real: System) -> None:
    system = real
    asked = system.post("/sessions", {"train": False})
    for question in SENTENCES:
        assert system.say(asked, question, max_tokens=24).choices[0].message.content
    # A session that is not trained is obeyed wholly: temperature 0 is greedy.
    capital = system.say(asked, "What is the capital of France?", max_tokens=24, temperature=0)
    assert "Paris" in capital.choices[0].message.content
    tickets = system.post("/groups", {"size": GROUP})["sessions"]
    with ThreadPoolExecutor(GROUP) as pool:
        list(pool.map(lambda ticket: system.say(ticket, SENTENCES[0], max_tokens=32), tickets))
    for number, ticket in enumerate(tickets):
        system.end(ticket, float(number % 2))
    taken = [memory_gb(system)]

    def is_served() -> bool:
        taken.append(memory_gb(system))
        return system.serving() == 1

    wait_until(is_served, 1200)
    metrics = system.trainer("/status")["metrics"]
    assert metrics["mismatch/abs_logp"] <= 5e-5, "engine and trainer compute the same model in float32"
    assert system.say(asked, SENTENCES[0], max_tokens=24).choices[0].message.content
    most = max(taken, key=lambda each: sum(each.values()))
    has_adapters = system.settings.services["trainer"] != {}
    assert sum(most.values()) <= (6 if has_adapters else 9), most
