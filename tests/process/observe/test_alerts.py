"""Each alert of Prometheus fires when it should, and not otherwise, and has its lines in the runbook."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.observe.alert_cases import CASES, Case, Series
from tests.support.observe.programs import PROMTOOL, needs_prometheus

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy/observe/prometheus/rules.yml"
RUNBOOK = ROOT / "docs/runbook.md"


def rules() -> dict[str, Mapping[str, Any]]:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


def promtool(*arguments: str | Path) -> str:
    assert PROMTOOL is not None
    ended = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@needs_prometheus
def test_the_rules_are_valid() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", RULES)


def questions(case: Case) -> Iterator[dict[str, Any]]:
    """Promtool's tests of one case: the alert fires on some series, and does not on the others."""
    rule = rules()[case.alert]
    fires = {"exp_labels": {**rule["labels"], **case.labels}, "exp_annotations": rule["annotations"]}
    expected: tuple[tuple[Series, list[dict[str, Any]]], ...] = ((case.fires, [fires]), (case.quiet, []))
    for series, alerts in expected:
        yield {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": alerts}],
        }


@needs_prometheus
def test_each_alert_fires_when_it_should_and_not_otherwise(tmp_path: Path) -> None:
    files = []
    for number, case in enumerate(CASES):  # promtool would evaluate all rules for each case, which takes long
        rule, file = tmp_path / f"rule-{number}.yml", tmp_path / f"test-{number}.yml"
        rule.write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rules()[case.alert]]}]}))
        asked = {"rule_files": [str(rule)], "evaluation_interval": "1m", "tests": list(questions(case))}
        file.write_text(yaml.safe_dump(asked), encoding="utf-8")
        files.append(file)
    promtool("test", "rules", *files)


def test_each_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == set(rules())


@pytest.mark.parametrize("alert", rules())
def test_each_alert_has_its_lines_in_the_runbook(alert: str) -> None:
    rule = rules()[alert]
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{alert.lower()}"
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    found = re.search(rf"^### {alert}\n(.*?)(?=^##|\Z)", RUNBOOK.read_text(encoding="utf-8"), re.S | re.M)
    assert found is not None
    assert rule["annotations"]["summary"].endswith(".")
    for part in ("See:", "Do:"):
        assert part in found[1]


def test_the_runbook_has_no_alert_that_is_not_there() -> None:
    named = re.findall(r"^### (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.M)
    assert named == list(rules())
