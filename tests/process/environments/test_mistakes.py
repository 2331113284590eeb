"""Mistakes of who plays an environment are answered by one sentence, also those that its process finds."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.mistakes import mistakes_at
from tests.support.weir.commands import weir

COIN = """
class Coin:
    def reset(self, task): return "heads or tails?"
    def step(self, answer): return None, float("heads" in answer), True, False, {}
"""


@pytest.mark.parametrize("given", mistakes_at("episodes"))
def test_the_answer_says_what_to_do(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(COIN)
    Path("lacks.py").write_text(f"import nowhere_else\n{COIN}")
    told = weir(*shlex.split(given["episodes"]))
    assert told.status == given.get("status", 1)
    said = [line for line in told.both.strip().splitlines() if not line.startswith("looking at")]
    assert any(re.search(given["answer"], line) for line in said), told.both
    assert "Traceback" not in told.both
