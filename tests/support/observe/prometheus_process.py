"""A Prometheus that reads services of a test."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.observe.programs import PROMETHEUS
from tests.support.serving import free_port
from tests.support.waiting import wait_until

READ_WITHIN_S = 120.0


@dataclass
class PrometheusProcess:
    url: str
    http: httpx.Client

    def ask(self, expr: str) -> list[dict[str, Any]]:
        """The series of an expression now. Raises AssertionError if it is not valid."""
        reply = self.http.get(f"{self.url}/api/v1/query", params={"query": expr})
        assert reply.status_code == 200, f"{expr}: {reply.text}"
        found: list[dict[str, Any]] = reply.json()["data"]["result"]
        return found


@contextmanager
def prometheus(root: Path, urls: Mapping[str, Sequence[str]]) -> Iterator[PrometheusProcess]:
    """Reads the services, by job, each second. Each was read several times when the block begins."""
    assert PROMETHEUS is not None
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://") for url in found]}]}
        for job, found in urls.items()
    ]
    configuration = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": jobs}
    file, port = root / "prometheus.yml", free_port()
    file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    command = [
        PROMETHEUS,
        f"--config.file={file}",
        f"--storage.tsdb.path={root / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (root / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(timeout=120) as http:
            started = PrometheusProcess(f"http://127.0.0.1:{port}", http)
            count = sum(map(len, urls.values()))
            wait_until(lambda: _read_often(started) == count, READ_WITHIN_S)
            yield started
    finally:
        process.terminate()
        process.wait(timeout=120)


def _read_often(started: PrometheusProcess) -> int:
    try:
        ready = started.http.get(f"{started.url}/-/ready").status_code == 200
    except httpx.TransportError:
        return 0
    return len(started.ask("count_over_time((up == 1)[5m:1s]) > 4")) if ready else 0
