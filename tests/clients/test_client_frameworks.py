"""The client library with frameworks, each in its own environment: the blocks of docs/client.md."""

import re
from pathlib import Path

import pytest

from tests.support.agents.running import ENVIRONMENTS as AGENTS
from tests.support.clients.stack import ENVIRONMENTS, HERMETIC, ROOT, inherited, told
from tests.support.environments.running import RunTest

BLOCKS = re.findall(r"```python\n# (\S+)\n(.*?)```", (ROOT / "docs" / "client.md").read_text("utf-8"), re.S)
PLACES = {
    "openai-agents": ENVIRONMENTS / "openai_agents",
    "LangGraph": ENVIRONMENTS / "langgraph",
    "pydantic-ai": AGENTS / "pydantic_ai",
    "smolagents": ENVIRONMENTS / "smolagents",
}
START_S = 300.0
"""Several frameworks start slowly, and the machine may be busy."""


def answer(prompt: str) -> str:
    return "7"


def test_each_block_has_an_environment() -> None:
    assert [name for name, _ in BLOCKS] == list(PLACES)


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_a_framework_takes_a_session_in_one_line(
    running: RunTest, tmp_path: Path, name: str, block: str
) -> None:
    program = tmp_path / "program.py"
    head = 'import json\nimport weir\n\nquestion = {"role": "user", "content": "value of c?"}\n'
    program.write_text(f"{head}{block}\nprint(json.dumps([answer, s.verdict['code'], s.total]))\n")
    paths = ":".join(str(ROOT / each) for each in ("", "queue", "deploy"))
    own = {"PYTHONPATH": paths, "WEIR_GATEWAY_URL": running.url, "HOME": str(tmp_path)}
    python = PLACES[name] / "bin" / "python"
    assert told([python, program], inherited() | HERMETIC | own, START_S, tmp_path) == ["7", "ready", 1.0]
    (session,) = running.sessions()
    assert [turn["relation"] for turn in session["turns"]] == ["root"]
