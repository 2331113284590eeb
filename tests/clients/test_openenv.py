"""Environments that the real OpenEnv serves, in a Python environment of its own, against a real gateway.

`make test-clients` installs the library. The engine is scripted.
"""

import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import ClientSession

from environments.errors import UnknownEnvironment
from tests.support.agents.acting_engine import tool_call
from tests.support.environments.running import RunTest
from tests.support.serving import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "run" / "environments" / "openenv" / "bin" / "python"


@dataclass
class ServedEnvironments:
    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def serving_openenv(
    kind: str, sessions: int = 64, ping_timeout_s: float = 20.0
) -> Iterator[ServedEnvironments]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    program = ROOT / "tests" / "clients" / "openenv" / "serve.py"
    command = [str(PYTHON), str(program), kind, str(port), str(sessions), str(ping_timeout_s)]
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: process.poll() is not None or answers(url), 120)
            yield ServedEnvironments(url, process)
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


async def play(running: RunTest, url: str, **given: Any) -> Any:
    return await running.play_library(f"openenv:{url}", **({"step_s": 20.0} | given))


def answer(prompt: str) -> str:
    """The next number of an episode. In every fifth task the model first says something else."""
    first = int(re.findall(r"count from (\d)", prompt)[-1])
    if first == 4 and "error" not in prompt:
        return "four"
    return str(first + len(re.findall("next", prompt)))


async def test_rewards_of_steps_land_on_their_turns(running: RunTest) -> None:
    with serving_openenv("count") as served:
        summary = await play(running, served.url + "/", group_size=4, episodes=200, concurrency=32)
    assert summary["by_status"] == {"completed": 200}
    sessions = running.sessions()
    assert len(sessions) == 200
    erring = 0
    for session in sessions:
        rewards = [turn["reward"] for turn in session["turns"]]
        if "count from 4" in session["turns"][0]["context_text"]:
            erring += 1
            assert rewards == [None, 1.0, None, None], "what is no action earns nothing"
            assert "error: 'four' is no integer" in session["turns"][1]["context_text"]
        else:
            assert rewards == [1.0, None, None]
        assert session["reward"] == 1.25
        assert {turn["relation"] for turn in session["turns"]} == {"root", "extends"}
    assert erring == 40
    assert len({session["task_id"] for session in sessions}) == 50


async def test_more_episodes_than_the_server_plays_wait_for_their_place(running: RunTest) -> None:
    with serving_openenv("count", sessions=2) as served:
        summary = await play(running, served.url, group_size=4, episodes=40, concurrency=16, wait_s=60.0)
    assert summary["by_status"] == {"completed": 40}


async def test_a_server_without_a_place_fails_the_episode(running: RunTest) -> None:
    with serving_openenv("count", sessions=1) as served:
        async with ClientSession() as other, other.ws_connect(f"{served.url}/ws") as occupied:
            await occupied.send_str('{"type": "reset"}')
            await occupied.receive()
            summary = await play(running, served.url, group_size=1, episodes=1, wait_s=1.0)
    assert summary["by_status"] == {"failed": 1}
    (session,) = running.sessions(verdict="failed")
    assert "let nobody in for 1 s: Server at capacity: 1/1" in session["verdict"]["detail"]
    assert session["turns"] == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_hung_server_fails_its_sessions(running: RunTest, how: signal.Signals) -> None:
    asked = Counter[str]()

    def strike(prompt: str) -> str:
        asked["all"] += 1
        if asked["all"] == 40:
            served.process.send_signal(how)
        return answer(prompt)

    running.engine.answer = strike
    with serving_openenv("count") as served:
        summary = await play(
            running, served.url, group_size=1, episodes=32, concurrency=16, step_s=2.0, most_failed_groups=99
        )
    failed = running.sessions(verdict="failed")
    assert summary["by_status"]["failed"] == len(failed) >= 16
    assert any(len(session["turns"]) > 1 for session in failed), "it was in the middle of episodes"
    for session in failed:
        assert session["verdict"]["code"] == "failed"
        assert session["reward"] is None
        assert all(turn["reward"] is None for turn in session["turns"])


async def test_an_error_of_the_environment_fails_the_episode(running: RunTest) -> None:
    running.engine.answer = lambda prompt: '{"number": -1}'
    with serving_openenv("count") as served:
        summary = await play(running, served.url, group_size=1, episodes=1)
    assert summary["by_status"] == {"failed": 1}
    (session,) = running.sessions()
    assert "EXECUTION_ERROR: the counter is gone" in session["verdict"]["detail"]


async def test_the_model_reads_what_the_schema_has_against_its_action(running: RunTest) -> None:
    said = iter(['{"numbr": 1}', "0", "1", "2"])
    running.engine.answer = lambda prompt: next(said)
    with serving_openenv("count") as served:
        await play(running, served.url, group_size=1, episodes=1)
    (session,) = running.sessions()
    assert (
        "number: Field required; numbr: Extra inputs are not permitted" in session["turns"][1]["context_text"]
    )
    assert session["reward"] == 1.25


async def test_a_connection_lives_while_the_model_thinks(running: RunTest) -> None:
    def slowly(prompt: str) -> str:
        time.sleep(4.0)  # longer than the server waits for the answer to a ping
        return answer(prompt)

    running.engine.answer = slowly
    with serving_openenv("count", ping_timeout_s=1.5) as served:
        summary = await play(running, served.url, group_size=1, episodes=1)
    assert summary["by_status"] == {"completed": 1}


async def test_tasks_that_a_server_lists_are_played_and_other_splits_refused_at_once(
    running: RunTest,
) -> None:
    with serving_openenv("listed") as served:
        with pytest.raises(UnknownEnvironment, match="no split 'dev', only test, train"):
            await play(running, served.url, options={"split": "dev"})
        summary = await play(running, served.url, mode="eval", group_size=1)
    tasks = sorted(each["task_id"] for each in summary["tasks"])
    assert tasks == [f"openenv:Listed:train:{index}" for index in range(4)]
    assert summary["reward"]["mean"] == 1.25


async def test_tools_are_called_and_their_rewards_land_on_their_turns(running: RunTest) -> None:
    calls = [
        tool_call("add", a="x", b=3),
        tool_call("ad"),
        tool_call("add", a=2, b=3),
        tool_call("submit", value=5),
    ]
    running.engine.answer = lambda prompt: calls.pop(0)
    with serving_openenv("sums") as served:
        summary = await play(running, served.url, group_size=1, episodes=1)
    assert summary["by_status"] == {"completed": 1}
    (session,) = running.sessions()
    assert [turn["reward"] for turn in session["turns"]] == [None, None, 0.25, None]
    assert session["reward"] == 1.25
    texts = [turn["context_text"] for turn in session["turns"]]
    assert "what is 2 + 3?" in texts[0]
    assert "Add two numbers." in texts[0]
    assert "Input should be a valid integer" in texts[1]
    assert "there is no tool" in texts[2]


async def test_an_address_without_a_server_is_told_at_once(running: RunTest) -> None:
    with pytest.raises(UnknownEnvironment, match="no environment of an OpenEnv server at"):
        await play(running, f"http://127.0.0.1:{free_port()}")
