"""docs/rewards.md: its examples run as they stand. The pages of settings and metrics have what it lacks."""

import re
from pathlib import Path

import yaml

from docs.site.reference import metrics_page
from reward_service.settings import RewardSettings
from tests.support.reward_service.running import reward_service

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_example_of_graders_runs() -> None:
    section = PAGE.split("## OpenAI's graders")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    with reward_service() as rewards:
        code = code.replace("http://127.0.0.1:8300", rewards.url).replace("ADMIN-KEY", "admin-key")
        exec(compile(code, "docs/rewards.md", "exec"), {})  # noqa: S102 - the page's own example


def test_the_rules_of_the_page_are_settings() -> None:
    (document,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    settings = RewardSettings(**yaml.safe_load(document)["rewards"])
    kinds = ["env", "openai_grader", "python", "http", "relative", "judge"]
    assert [rule.kind for rule in settings.rules] == kinds
    assert settings.rules[0].matches("sums-1", {"environment": "textarena:Chess-v0"})
    assert not settings.rules[0].matches("sums-1", {})
    assert settings.rules[1].matches("sums-1", {})
    assert settings.rules[5].matches(None, {})


def test_every_metric_is_explained() -> None:
    rule = {"name": "own", "kind": "python", "source": "def grade(sample, item): return 1.0"}
    with reward_service(rules=[rule]) as rewards:
        names = re.findall(r"^# TYPE (\S+)", rewards.http.get(f"{rewards.url}/metrics").text, re.M)
    shown = [name for name in names if not name.endswith("_created")]
    assert len(shown) > 3
    assert not set(shown) - set(
        re.findall(r"^\| `(weir_rewards_\w+)` \|.*\w \|$", "\n".join(metrics_page()), re.M)
    )
