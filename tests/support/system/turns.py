"""Reads the token versions of turns and the number of continued generations from a running system."""

from typing import Any

from tests.support.system.real_system import System


def versions_of(turn: dict[str, Any]) -> list[int]:
    """The version of each output token. Checks that the spans cover the output without gap or overlap."""
    versions: list[int] = []
    for span in turn["versions"]:
        assert span["start"] == len(versions)
        versions += [span["version"]] * (span["end"] - span["start"])
    assert len(versions) == len(turn["output_ids"]) == len(turn["logprobs"])
    return versions


def retried(system: System) -> float:
    """How many generations continued on an engine after a fault."""
    text = system.request("GET", "/metrics", key="").text
    lines = [line for line in text.splitlines() if line.startswith("weir_engine_faults_total{")]
    return sum(float(line.split()[-1]) for line in lines if 'outcome="retried"' in line)
