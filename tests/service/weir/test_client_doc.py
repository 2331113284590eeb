"""The blocks of docs/client.md run as they stand, one after the other, on a real gateway.

`tests/clients/test_client_frameworks.py` runs those of frameworks.
"""

import re
from pathlib import Path

import pytest

from tests.support.gateway.running import CLIENT_KEY, RunningGateway

PAGE = Path(__file__).parents[3] / "docs" / "client.md"


def test_the_page_runs_as_written(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEIR_GATEWAY_URL", gateway.url)
    monkeypatch.setenv("WEIR_CLIENT_KEYS", CLIENT_KEY)
    gateway.engine.mind = "8"
    blocks = re.findall(
        r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").split("## Frameworks")[0], re.S
    )
    assert len(blocks) == 4
    exec("\n".join(blocks), {"__name__": "page"})  # noqa: S102 - our own file
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["ready 0.0", "1.0"]
    assert "4 groups, 0 with different rewards, version 0 → 0, reward" in said[2]
    statuses = [row["status"] for row in gateway.get("/sessions?limit=1000").json()["data"]]
    assert statuses == ["completed"] * (1 + 4 + 1 + 16 + 16 + 16)
