"""The guide: its environment of twenty lines plays."""

import re
from pathlib import Path

from environments.settings import RunSettings
from environments.start_run import play_run
from tests.support.environments.running import RunTest

GUIDE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")


async def test_the_environment_of_the_guide_is_played(running: RunTest, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(block.splitlines()) <= 20
    (tmp_path / "guide_game.py").write_text(block)

    def halve(prompt: str) -> str:
        low, high = 0, 9
        for guess, hint in re.findall(r"assistant\n(\d).*?user\n(higher|lower)", prompt, re.DOTALL):
            low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
        return str((low + high) // 2)

    running.engine.answer = halve
    place = running.place.__class__(running.run_dir, running.url, None, directory=tmp_path)
    settings = RunSettings(environment="python:guide_game:Guess", mode="eval", tasks=10)
    summary = await play_run(settings, place, lambda line: None)
    assert summary["reward"]["mean"] == 1.0
    assert {len(each["turns"]) for each in running.sessions()} == {1, 2, 3, 4}
