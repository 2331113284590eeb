"""The examples against a gateway with keys: they say what became of their sessions, and what is missing."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway.running import CLIENT_KEY, RunningGateway
from tests.support.weir.notebooks import code_of
from weir.client import GatewayFault

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def keys(gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `weir up` writes the clients' keys, in a directory with its gateway's address."""
    monkeypatch.chdir(tmp_path)
    for name in ("GATEWAY_URL", "CLIENT_KEYS", "CLIENT_KEYS_FILE", "STACK__RUN_DIR"):
        monkeypatch.delenv(f"WEIR_{name}", raising=False)
    path = Path("run/keys/client_keys")
    path.parent.mkdir(parents=True)
    path.write_text(f"{CLIENT_KEY}\n")
    state = {"services": {"gateway": {"url": gateway.url}}}
    Path("run/stack.json").write_text(json.dumps(state))
    return path


def test_the_five_lines_say_what_becomes_of_a_single_session(
    keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (EXAMPLES / "five_lines.py").read_text(encoding="utf-8")
    exec(code, {})  # noqa: S102 - our own file
    said = capsys.readouterr().out
    assert "compared with no other session, so by default no step trains it" in said
    assert "waits for a step" not in said
    keys.write_text("sk-wrong")
    with pytest.raises(GatewayFault, match="401"):
        exec(code, {})  # noqa: S102 - our own file


def tool_agent() -> Any:
    spec = importlib.util.spec_from_file_location("tool_agent", EXAMPLES / "tool_agent.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_agent_plays_until_a_version_has_learned_or_says_where_to_look(
    gateway: RunningGateway, keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tool_agent()
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


def test_the_notebook_of_sessions_shows_what_was_recorded(
    keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(code_of(EXAMPLES / "sessions.ipynb"), {"__name__": "notebook"})  # noqa: S102 - our own file
    said = capsys.readouterr().out.splitlines()
    assert "'code': " in said[1]
    assert [line.split()[0] for line in said[2:6]] == ["0.00", "0.33", "0.67", "1.00"]
    assert said[6].startswith("ready [{'version': 0, ")
    assert len(said) > 7


def test_the_notebook_of_training_draws_its_curve(
    gateway: RunningGateway, keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    gateway.engine.mind = "7"
    code = code_of(EXAMPLES / "training.ipynb").replace("GROUPS = 80", "GROUPS = 12")
    exec(code, {"__name__": "notebook"})  # noqa: S102 - our own file
    said = capsys.readouterr().out.splitlines()
    assert said[0] == said[-1] == "mean reward 1.00, version 0"
    assert said[1] == "12 groups, 0 with different rewards, version 0 → 0, reward 1.000 → 1.000"
    assert [line.split("█")[0] for line in said[2:4]] == ["groups  1 to 10 ", "groups 11 to 12 "]
