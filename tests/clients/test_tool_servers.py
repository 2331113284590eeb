"""Tools of real MCP servers, in the Python environment of the package `mcp`, against a real gateway.

`make test-clients` installs the package. The engine is scripted.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import environments.tools
from environments.errors import UnknownEnvironment
from environments.hosts import tools_command
from environments.settings import ToolServerSettings
from environments.tools import ToolServers
from tests.support.agents.acting_engine import tool_call
from tests.support.environments.nothing import NoEnvironments
from tests.support.environments.running import RunTest
from tests.support.serving import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "run" / "environments" / "mcp" / "bin" / "python"
PROGRAM = ROOT / "tests" / "clients" / "mcp_servers" / "vault.py"
STDIO = {"command": str(PYTHON), "args": [str(PROGRAM), "stdio"]}


def answer(prompt: str) -> str:
    """Ask for the hint, look with a text and then with the number, and say what is kept."""
    if found := re.findall(r"keeps (\d+)", prompt):
        return str(found[-1])
    if found := re.findall(r"the key is (\d+)", prompt):
        return tool_call("look", key=int(found[-1]) if "error" in prompt else "no number")
    return tool_call("hint")


async def play(running: RunTest, servers: dict[str, Any], **given: Any) -> Any:
    return await running.play("Vault", tool_servers=servers, **({"step_s": 30.0} | given))


@contextmanager
def served(transport: str) -> Iterator[dict[str, Any]]:
    if transport == "stdio":
        yield STDIO
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}/{'sse' if transport == 'sse' else 'mcp'}"
    with subprocess.Popen([str(PYTHON), str(PROGRAM), transport, str(port)]) as process:
        try:
            wait_until(lambda: process.poll() is not None or is_open(port), 60)
            yield {"url": url, "transport": "sse"} if transport == "sse" else {"url": url}
        finally:
            process.kill()


def is_open(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/", timeout=5)
    except httpx.TransportError:
        return False
    return True


@pytest.mark.parametrize("transport", ["stdio", "streamable-http", "sse"])
async def test_the_model_calls_tools_of_a_server_and_of_the_environment(
    running: RunTest, transport: str
) -> None:
    with served(transport) as server:
        summary = await play(running, {"vault": server}, group_size=2, episodes=8, concurrency=4)
    assert summary["by_status"] == {"completed": 8}
    for session in running.sessions():
        assert session["reward"] == 1.0
        texts = [turn["context_text"] for turn in session["turns"]]
        assert len(texts) == 4
        assert "error" in texts[2], "the model reads that a text is no number"
        assert ("call 1," in texts[3]) or transport != "stdio", "each episode has a server of its own"
        assert {turn["relation"] for turn in session["turns"][1:]} == {"extends"}


async def test_what_a_tool_refuses_is_read_by_the_model(running: RunTest) -> None:
    calls = iter([tool_call("refuse"), tool_call("picture"), tool_call("vanish"), "0"])
    running.engine.answer = lambda prompt: next(calls)
    await play(running, {"vault": STDIO}, group_size=1, episodes=1)
    (session,) = running.sessions()
    texts = [turn["context_text"] for turn in session["turns"][1:]]
    assert "Error executing tool refuse" in texts[0]
    assert "content of the type image is not shown" in texts[1]
    assert "there is no tool 'vanish'" in texts[2]
    assert session["status"] == "completed"


async def test_a_long_result_is_cut_off_and_says_so(tmp_path: Path) -> None:
    known = {"vault": ToolServerSettings(command=str(PYTHON), args=(str(PROGRAM), "stdio"))}
    command = tools_command(ROOT / "run" / "environments")
    async with ToolServers(NoEnvironments(), known, command, tmp_path, step_s=30.0) as servers:
        offered = await servers.open("one")
        text = await servers.call("one", offered["long"], {})
    assert text == f"{'x' * 2**18}\n[cut off after {2**18} characters]"


async def test_a_server_that_dies_or_hangs_fails_its_episode_alone(running: RunTest) -> None:
    def faulty(prompt: str) -> str:
        if re.search(r"the key is 1\b", prompt):
            return tool_call("die")
        if re.search(r"the key is 2\b", prompt):
            return tool_call("wait", seconds=1000)
        return answer(prompt)

    running.engine.answer = faulty
    summary = await play(running, {"vault": STDIO}, group_size=1, episodes=6, concurrency=6, step_s=20.0)
    assert summary["by_status"] == {"completed": 4, "failed": 2}
    dead, hung = [each for each in running.sessions() if each["status"] == "failed"]
    assert dead["reward"] is None
    assert hung["reward"] is None, "a failure is no 0"
    assert "did not answer in time" in hung["verdict"]["detail"]


async def test_servers_end_with_their_episodes_and_a_dead_host_is_replaced(running: RunTest) -> None:
    killed: list[int] = []

    def strike(prompt: str) -> str:
        if not killed and "the key is" in prompt:
            (host,) = hosts()
            killed.append(host.pid)
            host.kill()
        return answer(prompt)

    running.engine.answer = strike
    summary = await play(running, {"vault": STDIO}, group_size=2, episodes=8, concurrency=2)
    assert summary["by_status"]["completed"] >= 4
    assert sum(summary["by_status"].values()) == 8
    wait_until(lambda: not hosts() and not running_program(str(PROGRAM)), 60)


def hosts() -> list[psutil.Process]:
    children = [each.pid for each in psutil.Process().children(recursive=True)]
    return [each for each in running_program("tool_servers.py") if each.pid in children]


def running_program(program: str) -> list[psutil.Process]:
    """All processes of this machine whose command has such a part."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if any(part.endswith(program) for part in each.info["cmdline"] or ())]


async def test_variables_are_for_the_server_and_not_for_the_record(
    running: RunTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWNER_OF_TEST", "a-secret-owner")
    server = {**STDIO, "env": {"VAULT_OWNER": "${OWNER_OF_TEST}"}, "tools": ["look"]}
    await play(running, {"vault": server}, group_size=1, episodes=1)
    (session,) = running.sessions()
    assert "for a-secret-owner" in session["turns"][-1]["context_text"]
    assert "refuse" not in session["turns"][0]["context_text"], "the model is offered what is named"
    assert "a-secret-owner" not in (running.run_dir / "run.json").read_text()


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({"vault": {"command": "/no/such/program"}}, "cannot be used"),
        ({"vault": {"url": "http://127.0.0.1:1/mcp"}}, "cannot be used"),
        ({"vault": {**STDIO, "env": {"A": "${NOT_SET_HERE}"}}}, "NOT_SET_HERE"),
        ({"vault": {**STDIO, "tools": ["lok"]}}, "vault has no tool 'lok', only look"),
        ({"one": STDIO, "two": STDIO}, "two tools 'die'"),
    ],
)
async def test_a_mistake_is_told_before_the_first_episode(
    running: RunTest, servers: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnknownEnvironment, match=message):
        await play(running, servers, group_size=1, episodes=1)
    assert running.sessions() == []


async def test_a_server_that_never_answers_is_ended(
    running: RunTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments.tools, "OPENS_WITHIN_S", 5.0)
    with pytest.raises(UnknownEnvironment, match="did not answer in time"):
        await play(running, {"mute": {"command": "/bin/sleep", "args": ["1234"]}}, group_size=1, episodes=1)
    assert not [
        each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["/bin/sleep", "1234"]
    ]


async def test_two_servers_with_the_same_tools_have_prefixes(running: RunTest) -> None:
    calls = iter([tool_call("two_look", key=5), "0"])
    running.engine.answer = lambda prompt: next(calls)
    await play(running, {"one": STDIO, "two": {**STDIO, "prefix": "two_"}}, group_size=1, episodes=1)
    (session,) = running.sessions()
    assert "5 keeps 38" in session["turns"][1]["context_text"]
