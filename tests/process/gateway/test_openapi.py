"""The gateway behaves as its OpenAPI document says: schemathesis finds no 500 and no undocumented answer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
CONFIG = Path(__file__).with_name("schemathesis.toml")


AGENTS = "^/(v1|inference|sessions|groups|live|ready|metrics)"
ALL_PHASES = "examples,coverage,fuzzing,stateful"


@pytest.mark.parametrize(
    ("paths", "key", "phases"),
    [
        (AGENTS, CLIENT_KEY, "fuzzing"),
        pytest.param(AGENTS, CLIENT_KEY, ALL_PHASES, marks=pytest.mark.long),
        pytest.param("^/api", CLIENT_KEY, ALL_PHASES, marks=pytest.mark.long),
        pytest.param("^/admin", ADMIN_KEY, ALL_PHASES, marks=pytest.mark.long),
    ],
    ids=["quick", "agent", "tinker", "operator"],
)
def test_schemathesis_finds_no_500_and_no_undocumented_shape(
    backends: Backends, paths: str, key: str, phases: str, tmp_path: Path
) -> None:
    with backends.gateway() as gateway:
        command = [str(SCHEMATHESIS), "--config-file", str(CONFIG), "run", f"{gateway.url}/openapi.json"]
        command += ["--include-path-regex", paths, "-H", f"Authorization: Bearer {key}"]
        command += ["--phases", phases, "--max-examples", "3", "--seed", "7"]
        command += ["--suppress-health-check", "all"]
        command += ["--exclude-path", "/api/v1/forward_backward"]  # its body is protobuf
        command += ["--generation-database", ":memory:", "--no-color"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path)
        tested = re.search(r"Tested: (\d+)", run.stdout)
        assert run.returncode == 0, run.stdout[-6000:]
        assert tested is not None
        assert int(tested[1]) >= 9
        assert gateway.get("/live").status_code == 200
