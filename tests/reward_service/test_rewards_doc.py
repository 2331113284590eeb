"""docs/rewards.md: its examples run as they stand, and it names every setting and metric."""

import re
from pathlib import Path

from pydantic import BaseModel

from reward_service.settings import RewardSettings
from tests.support.reward_service.running import reward_service

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_example_of_graders_runs() -> None:
    section = PAGE.split("## OpenAI's graders")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    with reward_service() as rewards:
        code = code.replace("http://127.0.0.1:8300", rewards.url).replace("ADMIN-KEY", "admin-key")
        exec(compile(code, "docs/rewards.md", "exec"), {})  # noqa: S102 - the page's own example


def test_every_setting_is_explained() -> None:
    names = list[str]()
    for name, field in RewardSettings.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += inner.model_fields
        else:
            names.append(name)
    assert not [name for name in names if f"`{name}`" not in PAGE and f".{name}`" not in PAGE]


def test_every_metric_is_explained() -> None:
    with reward_service() as rewards:
        names = re.findall(r"^# TYPE (\S+)", rewards.http.get(f"{rewards.url}/metrics").text, re.M)
    shown = [name for name in names if not name.endswith("_created")]
    assert len(shown) > 3
    assert not [name for name in shown if f"`{name}" not in PAGE]
