"""The examples against a gateway with keys: they say what became of their sessions, and what is missing."""

import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.running import CLIENT_KEY, RunningGateway

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `weir up` writes the clients' keys, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    path = Path("run/keys/client_keys")
    path.parent.mkdir(parents=True)
    path.write_text(f"{CLIENT_KEY}\n")
    return path


def ten_lines(gateway: RunningGateway) -> None:
    code = (EXAMPLES / "ten_lines.py").read_text(encoding="utf-8")
    exec(code.replace("http://127.0.0.1:8000", gateway.url), {})  # noqa: S102 - our own file


def test_the_ten_lines_say_what_becomes_of_a_single_session(
    gateway: RunningGateway, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ten_lines(gateway)
    said = capsys.readouterr().out
    assert "compared with no other session, so by default no step trains it" in said
    assert "waits for a step" not in said
    keys.write_text("sk-wrong")
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        ten_lines(gateway)


def tool_agent(gateway: RunningGateway) -> Any:
    spec = importlib.util.spec_from_file_location("tool_agent", EXAMPLES / "tool_agent.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.GATEWAY = gateway.url
    return module


def test_the_tool_agent_plays_until_a_version_has_learned_or_says_where_to_look(
    gateway: RunningGateway,
    keys: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = tool_agent(gateway)
    monkeypatch.setattr(module, "MOST_GROUPS", 2)
    module.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["group 1", "group 2", "no new version yet"]
    assert "0 of 2 groups had different rewards; play more of them, `weir top` says what" in said[2]
    assert "all alike, so nothing is learned from it" in said[0]
    versions = iter([0, 0, 1])
    monkeypatch.setattr(module, "version_of", lambda _: next(versions))
    module.main()
    assert capsys.readouterr().out.splitlines()[-1] == (
        "version 1 has learned from such groups, and answers calls now"
    )
    listed = gateway.get("/sessions?limit=100").json()["data"]
    assert {each["task_id"] for each in listed} == {"value-of-c"}
    assert len({each["group_id"] for each in listed}) == 4
