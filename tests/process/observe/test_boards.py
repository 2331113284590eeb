"""Grafana's boards: the JSON is what the script makes, and each expression has data on a real Prometheus."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.observe.observed import Observed
from tests.support.observe.programs import needs_prometheus
from tests.support.observe.prometheus_process import prometheus

ROOT = Path(__file__).parents[3]
BOARDS = ROOT / "deploy/observe/grafana"
RULES = ROOT / "deploy/observe/prometheus/rules.yml"
NAMES = ("overview", "gateway", "engines", "training", "queue")
OF_PROMETHEUS = {"up"}


def board(name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((BOARDS / f"{name}.json").read_text(encoding="utf-8"))
    return made


def expressions(name: str) -> Iterator[tuple[str, str]]:
    """The title of the plot, and the expression."""
    for panel in board(name)["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def metric_names(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:weir_\w+|up)\b", re.sub(r'"[^"]*"', "", expr)))


def alert_expressions() -> list[str]:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule["expr"] for group in document["groups"] for rule in group["rules"]]


def test_the_files_are_what_the_script_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, BOARDS / "boards.py", tmp_path], check=True)
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.json")}
    assert made == {path.name: path.read_text(encoding="utf-8") for path in BOARDS.glob("*.json")}
    assert set(made) == {f"{name}.json" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_board_asks_the_chosen_data_source(name: str) -> None:
    made = board(name)
    assert made["uid"] == f"weir-{name}"
    plots = [panel for panel in made["panels"] if panel["type"] == "timeseries"]
    assert plots
    assert {panel["datasource"] for panel in plots} == {"${datasource}"}
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])


@pytest.mark.long
@needs_prometheus
def test_each_expression_has_data_on_a_prometheus_that_reads_real_services(
    observed: Observed, tmp_path: Path
) -> None:
    with prometheus(tmp_path, observed.urls) as server:
        asked = [(name, *each) for name in NAMES for each in expressions(name)]
        assert [each for each in asked if not server.ask(each[2])] == []
        for expr in alert_expressions():
            server.ask(expr)


@pytest.mark.long
def test_each_metric_of_boards_and_alerts_is_one_of_a_service(observed: Observed) -> None:
    shown = set(OF_PROMETHEUS)
    for url in (url for urls in observed.urls.values() for url in urls):
        text = httpx.get(f"{url}/metrics", timeout=120).text
        for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M):
            parts = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
            shown |= {name + part for part in parts.get(kind, ("",))}
    named = {each for name in NAMES for _, expr in expressions(name) for each in metric_names(expr)}
    named |= {each for expr in alert_expressions() for each in metric_names(expr)}
    absent = named - shown
    assert absent <= {"weir_worker_up"}  # of a gateway of several workers
