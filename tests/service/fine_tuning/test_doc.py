"""docs/fine_tuning.md: its example runs as it stands, and it names every setting and metric."""

import re
from pathlib import Path

import httpx
import pytest

from fine_tuning.settings import FineTuningLimits, FineTuningSettings
from tests.support.environments.running import RunTest
from tests.support.fine_tuning.running import fine_tuning

PAGE = (Path(__file__).parents[3] / "docs" / "fine_tuning.md").read_text(encoding="utf-8")


def test_the_example_runs(running: RunTest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running.engine.answer = lambda prompt: "4"
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    with fine_tuning(tmp_path / "jobs", running.url, "admin-key") as service:
        code = code.replace("http://127.0.0.1:8400", service.url).replace("ADMIN-KEY", "admin-key")
        exec(compile(code, "docs/fine_tuning.md", "exec"), {})  # noqa: S102 - the page's own example
    told = capsys.readouterr().out
    assert "The job has successfully completed: policy@" in told
    assert len(running.sessions()) == 8 * 2 * 2


def test_every_setting_and_metric_is_explained(running: RunTest, tmp_path: Path) -> None:
    names = [f"limits.{name}" for name in FineTuningLimits.model_fields]
    names += [name for name in FineTuningSettings.model_fields if name != "limits"]
    with fine_tuning(tmp_path / "jobs", running.url) as service:
        metrics = re.findall(r"^# TYPE (\S+)", httpx.get(f"{service.url}/metrics", timeout=120).text, re.M)
    assert len(metrics) == 2
    assert not [name for name in [*names, *metrics] if f"`{name}`" not in PAGE]
