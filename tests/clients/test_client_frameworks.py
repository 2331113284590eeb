"""The client library with frameworks, each in its own environment: the blocks of docs/client.md."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents.running import ENVIRONMENTS as AGENTS
from tests.support.clients.stack import ENVIRONMENTS, HERMETIC, ROOT, inherited, told
from tests.support.environments.running import RunTest, running_gateway

PAGE = (ROOT / "docs" / "client.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.S)
PROGRAMS = re.findall(r"```js\n// (\S+)\n(.*?)```", PAGE, re.S)
PLACES = {
    "openai-agents": ENVIRONMENTS / "openai_agents" / "bin" / "python",
    "LangGraph": ENVIRONMENTS / "langgraph" / "bin" / "python",
    "pydantic-ai": AGENTS / "pydantic_ai" / "bin" / "python",
    "smolagents": ENVIRONMENTS / "smolagents" / "bin" / "python",
    "claude-agent-sdk": AGENTS / "claude_agent_sdk" / "bin" / "python",
    "ai-sdk": Path(sys.executable),
}
NODE_MODULES = AGENTS / "ai_sdk" / "node_modules"
CONTEXT_LENGTH = 2**17
"""Claude's system prompt is long, and the small tokenizer makes more tokens of it than a real one."""
START_S = 300.0
"""Several frameworks start slowly, and the machine may be busy."""


def answer(prompt: str) -> str:
    return "7"


@pytest.fixture
def running(redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[RunTest]:
    with running_gateway(redis_url, tiny_model, tmp_path, context_length=CONTEXT_LENGTH) as running:
        running.engine.answer = answer
        yield running


def test_each_block_has_an_environment() -> None:
    assert [name for name, _ in BLOCKS] == list(PLACES)


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_a_framework_takes_a_session_in_one_line(
    running: RunTest, tmp_path: Path, name: str, block: str
) -> None:
    program = tmp_path / "program.py"
    head = (
        'import asyncio\nimport json\nimport weir\n\nquestion = {"role": "user", "content": "value of c?"}\n'
    )
    program.write_text(f"{head}{block}\nprint(json.dumps([answer, s.verdict['code'], s.total]))\n")
    for file, text in PROGRAMS:
        (tmp_path / file).write_text(text)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    known = {
        "PYTHONPATH": ":".join(str(ROOT / each) for each in ("", "queue", "deploy")),
        "WEIR_GATEWAY_URL": running.url,
        "HOME": str(tmp_path),
        "PATH": f"{NODE_MODULES / '.bin'}:{os.environ['PATH']}",
    }
    said = told([PLACES[name], program], inherited() | HERMETIC | known, START_S, tmp_path)
    assert said == ["7", "ready", 1.0]
    (session,) = running.sessions()
    own = [turn for turn in session["turns"] if turn["side_call"] is None]
    assert len(own) == 1
    assert own[0]["output_text"].startswith("7")
