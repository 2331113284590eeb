"""The rules by which the fleet is scaled: a real promtool reads them, and they measure what they say."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site.reference import metrics_page
from tests.support.kubernetes.pods import Pod, pods_of, ports
from tests.support.kubernetes.rendered import ROOT, SOURCE, Object, of_kind

MONITORING = SOURCE / "monitoring"
RULES: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
QUERIES = {each["name"]["as"]: each["metricsQuery"] for kind in RULES for each in RULES[kind]}
SERIES = """
sglang:token_usage{namespace="weir",pod="a"} 0.5+0x20
sglang:token_usage{namespace="weir",pod="b"} 0.9+0x20
sglang:num_queue_reqs{namespace="weir",pod="a"} 3+0x20
weir_engine_wait_seconds_sum{namespace="weir",pod="g1"} 0+6x20
weir_engine_wait_seconds_count{namespace="weir",pod="g1"} 0+3x20
weir_engine_wait_seconds_sum{namespace="weir",pod="g2"} 0+0x20
weir_engine_wait_seconds_count{namespace="weir",pod="g2"} 0+1x20
"""
EXPECTED = {
    "weir_engine_kv_usage": [('pod="a"', 0.5), ('pod="b"', 0.9)],
    "weir_engine_queued_requests": [('pod="a"', 3.0)],
    "weir_engine_wait_seconds_mean": [('namespace="weir"', 1.5)],
}
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian: prometheus)"
)


def test_every_metric_by_which_pods_are_scaled_has_a_rule(overlays: dict[str, list[Object]]) -> None:
    wanted = set()
    for scaler in of_kind(overlays["fleet"], "HorizontalPodAutoscaler").values():
        for metric in scaler["spec"]["metrics"]:
            if (source := metric.get("pods") or metric.get("external")) is not None:
                wanted.add(source["metric"]["name"])
    assert wanted == QUERIES.keys()


def test_the_rules_read_metrics_that_are_there() -> None:
    gateway = "\n".join(metrics_page())
    engine = ROOT / ".venv-engine/lib/python3.11/site-packages/sglang/srt/observability/metrics_collector.py"
    text = engine.read_text(encoding="utf-8") if engine.exists() else None
    for rule in [each for kind in RULES for each in RULES[kind]]:
        (name,) = re.findall(r"sglang:\w+|weir_\w+", rule["seriesQuery"])
        if name.startswith("weir_"):
            assert f"`{name.removesuffix('_sum')}`" in gateway
        elif text is not None:
            assert f'name="{name}"' in text


@promtool
def test_the_rules_measure_what_they_say(tmp_path: Path) -> None:
    rules = [{"record": f"found:{name}", "expr": filled(name)} for name in QUERIES]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "adapter", "rules": rules}]}))
    lines = [line.rsplit("} ", 1) for line in SERIES.strip().splitlines()]
    expressions = [
        {
            "expr": f"found:{name}",
            "eval_time": "10m",
            "exp_samples": [
                {"labels": f"found:{name}{{{label}}}", "value": value} for label, value in samples
            ],
        }
        for name, samples in EXPECTED.items()
    ]
    given = [{"series": f"{name}}}", "values": values} for name, values in lines]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": expressions}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
    check(["promtool", "test", "rules", "test.yml"], tmp_path)


def filled(name: str) -> str:
    """A query as the adapter asks it, for all pods of the namespace."""
    rule = next(each for kind in RULES for each in RULES[kind] if each["name"]["as"] == name)
    (series,) = re.findall(r"sglang:\w+|weir_\w+", rule["seriesQuery"])
    group = "pod" if "pod" in rule["resources"]["overrides"] else "namespace"
    query: str = rule["metricsQuery"]
    for template, value in (("Series", series), ("LabelMatchers", 'namespace="weir"'), ("GroupBy", group)):
        query = query.replace(f"<<.{template}>>", value)
    return query


def jobs(pods: dict[str, Pod]) -> dict[tuple[str, str], str]:
    """The job of each port that Prometheus reads, by the relabelling of its part: (pod, port) and the job."""
    document = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    (scraped,) = document["scrape_configs"]
    found = {}
    for name, pod in pods.items():
        for port in ports(pod.main):
            target = {"job": scraped["job_name"], "__meta_kubernetes_pod_container_port_name": port}
            for label, value in pod.labels.items():
                target["__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)] = value
            if relabelled(target, scraped["relabel_configs"]):
                found[name, port] = target["job"]
    return found


def relabelled(target: dict[str, str], rules: list[dict[str, Any]]) -> bool:
    """Whether Prometheus keeps the target. Changes its labels."""
    for rule in rules:
        value = ";".join(target.get(label, "") for label in rule["source_labels"])
        matches = re.fullmatch(rule.get("regex", ".*"), value) is not None
        if rule.get("action") in ("keep", "drop"):
            if matches is (rule["action"] == "drop"):
                return False
        elif matches:
            target[rule["target_label"]] = rule.get("replacement", value)
    return True


@promtool
@pytest.mark.parametrize("away", ["", "gateway", "rollout-server", "trainer"])
def test_the_alerts_are_for_the_jobs_that_prometheus_reads(
    overlays: dict[str, list[Object]], away: str, tmp_path: Path
) -> None:
    """While all pods answer, none fires; else the one of the service that is away."""
    alerts = {
        "gateway": ("WeirGatewayDown", {"severity": "critical"}),
        "rollout-server": ("WeirRolloutServerDown", {"severity": "warning"}),
        "trainer": ("WeirTrainerDown", {"severity": "critical"}),
    }
    rules = ROOT / "deploy" / "observe" / "prometheus" / "rules.yml"
    document = yaml.safe_load(rules.read_text(encoding="utf-8"))
    of_up = [each for group in document["groups"] for each in group["rules"] if "up{job=" in each["expr"]]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "up", "rules": of_up}]}))
    found = jobs(pods_of(overlays["fleet"]))
    series = [
        {"series": f'up{{job="{job}"}}', "values": f"{int(name != away)}x30"}
        for (name, port), job in found.items()
    ]
    expected = []
    for rule in of_up:
        name, labels = next((each for each in alerts.values() if each[0] == rule["alert"]), ("", {}))
        fires = away and alerts[away][0] == name
        given = {"exp_labels": labels | {"job": found.get((away, "http"), "")}}
        given |= {"exp_annotations": rule["annotations"]}
        expected.append(
            {"eval_time": "20m", "alertname": rule["alert"], "exp_alerts": [given] if fires else []}
        )
    assert {each["alert"] for each in of_up} >= {name for name, _ in alerts.values()}
    test = {"interval": "1m", "input_series": series, "alert_rule_test": expected}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
    check(["promtool", "test", "rules", "test.yml"], tmp_path)


@promtool
def test_prometheus_reads_its_part(tmp_path: Path) -> None:
    """Debian's Prometheus cannot ask Kubernetes for its targets, so it gets others."""
    document = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = document["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": ["weir"]}}]
    job["static_configs"] = [{"targets": ["127.0.0.1:8000"]}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(document))
    check(["promtool", "check", "config", "--syntax-only", "prometheus.yaml"], tmp_path)


def test_prometheus_finds_the_ports_of_all_services(overlays: dict[str, list[Object]]) -> None:
    assert jobs(pods_of(overlays["fleet"])) == {
        ("gateway", "http"): "gateway",
        ("rollout-server", "http"): "rollout_server",
        ("rollout-server", "engine"): "engine",
        ("trainer", "http"): "trainer",
    }


def check(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
