"""A crash run that gives up keeps the kills that it has made, and audits what they left."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.crash.result import read, write
from tests.crash.run import crash
from tests.crash.windows import Window
from weir.audit.evidence import EvidenceMissing


class Frail:
    """A system that is well again after each kill but one."""

    redis_url, checkpoints = "redis://nobody:1", Path("none")
    stack = SimpleNamespace(gateway_url="http://nobody:1", trainer_url="http://nobody:1")

    def __init__(self, ill_after: int, error: Exception) -> None:
        self.agents: Any = None
        self._left, self._error = ill_after, error

    def process_of(self, victim: str) -> SimpleNamespace:
        return SimpleNamespace(send_signal=lambda _: None, wait=lambda _: None)

    def heal(self, victim: str) -> float:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return 0.0

    def quiet(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("error", "kills"), [(TimeoutError("not well 240 s after"), 3), (ConnectionError("refused"), 2)]
)
@pytest.mark.parametrize("evidence", [True, False])
def test_a_run_that_gives_up_keeps_its_kills_and_is_audited(
    error: Exception, kills: int, evidence: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill after which it is not well counts, too."""
    audited = list[int]()

    @contextmanager
    def running(*_: object) -> Iterator[Frail]:
        yield Frail(2, error)

    def audit(*given: Any) -> SimpleNamespace:
        audited.append(len(given[1]))
        if not evidence:
            raise EvidenceMissing("Redis is gone")
        finding = SimpleNamespace(kind="lost", sentence="a turn", rule="x")
        return SimpleNamespace(findings=(finding,), answers=5, exit_code=1)

    class NoAgents:
        heard, counts = 0, {"turns": 0}

        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    calm = Window("trainer", "whenever", wait=lambda _: None)
    for name, fake in (("crash_system", running), ("audit", audit), ("Agents", NoAgents)):
        monkeypatch.setattr(f"tests.crash.run.{name}", fake)
    monkeypatch.setattr("tests.crash.run.read_answers", lambda _: [])
    monkeypatch.setattr("tests.crash.run.time.sleep", lambda _: None)
    run = crash(tmp_path, tmp_path, tmp_path, [calm] * 6, 1)
    assert [len(run.kills), len(audited), run.exit_code] == [kills, 1, 1]
    assert str(error) in (run.gave_up or "")
    write(run.result, tmp_path / "result.json")
    kept = read(tmp_path / "result.json")
    assert (len(kept.kills), kept.gave_up) == (kills, run.gave_up)
    assert kept.findings == (("lost: a turn (x)",) if evidence else ())
