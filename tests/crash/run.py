"""One crash run: starts the system and the agents, makes every kill of the plan, and audits at the end."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.crash.agents import Agents
from tests.crash.drive import drive, settle
from tests.crash.result import Kill, Result
from tests.crash.system import ADMIN_KEY, CLIENT_KEY, crash_system
from tests.crash.windows import Window
from weir.audit.audit import audit
from weir.audit.evidence import read_answers
from weir.audit.report import Report
from weir.audit.sources import Sources

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CrashRun:
    """The kills of a run, and the audit's report."""

    seed: int
    kills: Sequence[Kill]
    counts: dict[str, int]
    """The agents' actions and answers, counted by kind."""
    report: Report

    @property
    def result(self) -> Result:
        findings = tuple(
            f"{finding.kind}: {finding.sentence} ({finding.rule})" for finding in self.report.findings
        )
        return Result(self.seed, tuple(self.kills), self.report.answers, findings)


def crash(
    run_dir: Path,
    model_path: Path,
    engine_python: Path,
    windows: Sequence[Window],
    seed: int,
    told: Callable[[Kill], None] = lambda kill: None,
    redis: str = "single",
) -> CrashRun:
    answers = run_dir / "answers.jsonl"
    run_dir.mkdir(parents=True, exist_ok=True)
    with crash_system(run_dir, model_path, engine_python, redis) as system:
        system.agents = Agents(system.stack.gateway_url, CLIENT_KEY, answers, seed)
        with system.agents:
            kills = list(drive(system, windows, seed, told))
        settle(system)
        sources = Sources(
            redis_url=system.redis_url,
            trainer_url=system.stack.trainer_url,
            admin_key=ADMIN_KEY,
            checkpoint_dir=system.checkpoints,
        )
        return CrashRun(seed, kills, system.agents.counts, audit(sources, read_answers(answers)))
