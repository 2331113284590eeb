"""One crash run: the system and its agents, a kill in each planned window, and the audit at the end."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from redis.exceptions import RedisError

from tests.crash.agents import Agents
from tests.crash.result import Kill, Result
from tests.crash.system import ADMIN_KEY, CLIENT_KEY, CrashSystem, crash_system, kill, stand_still
from tests.crash.waits import NeverCame
from tests.crash.windows import OF_CLUSTER, WINDOWS, Window
from weir.audit.audit import Report, audit
from weir.audit.audit_sources import Sources
from weir.audit.evidence import EvidenceMissing, read_answers

logger = logging.getLogger(__name__)

TRIES = 5
"""How often to wait for a window. After that the kill happens anyway, and counts as a miss."""
SETTLES_WITHIN_S = 180.0


def plan(kills: int, seed: int, only: str = "", redis: str = "single") -> list[Window]:
    """Each window whose title contains `only`, equally often (±1), in an order that the seed determines."""
    draw, planned = random.Random(seed), list[Window]()
    possible = WINDOWS + (OF_CLUSTER if redis == "cluster" else ())
    windows = [window for window in possible if only in window.title]
    while len(planned) < kills:
        planned += draw.sample(windows, len(windows))
    return planned[:kills]


def drive(
    system: CrashSystem, windows: Sequence[Window], seed: int, told: Callable[[Kill], None]
) -> tuple[list[Kill], str | None]:
    """The kills, and why the run gave up before the last one, if it did."""
    draw, kills = random.Random(seed), list[Kill]()
    for window in windows:
        time.sleep(draw.uniform(0.2, 1.5))  # kills come at any time
        try:
            done, why = _kill(system, window, draw, sum(kill.answers for kill in kills))
        except Exception as error:  # what was killed before is worth an audit
            logger.exception("%s", window.title)
            return kills, f"{window.title}: {error!r}"
        kills.append(done)
        told(done)
        if why is not None:
            logger.error("giving up after %d of %d kills: %s", len(kills), len(windows), why)
            return kills, why
    return kills, None


def _kill(system: CrashSystem, window: Window, draw: random.Random, heard: int) -> tuple[Kill, str | None]:
    """The kill, and why the system is not well after it; None if it is."""
    victim = system.process_of(window.victim)  # before the wait, because the search may outlast the window
    came = _came(system, window)
    time.sleep(draw.uniform(0, window.lasting_s))  # the kill comes anywhere in a lasting state
    try:
        if window.stands_still_s:
            stand_still(victim, window.stands_still_s)
        else:
            kill(victim)
    except psutil.NoSuchProcess as error:
        logger.info("%s: %r", window.title, error)
        came = False
    hit = came and window.hit(system)
    began, why = time.monotonic(), None
    try:
        healed_s = system.recover(window.victim) if window.stands_still_s else system.heal(window.victim)
        window.after(system)
    except TimeoutError as error:
        healed_s, why = time.monotonic() - began, str(error)
    return Kill(window.title, hit, healed_s, system.agents.heard - heard), why


def _came(system: CrashSystem, window: Window) -> bool:
    for _ in range(TRIES):
        try:
            window.wait(system)
            return True
        except (NeverCame, RedisError, OSError, httpx.HTTPError) as error:
            logger.info("%s did not come: %r", window.title, error)
    return False


def settle(system: CrashSystem) -> None:
    """Wait until the trainer has nothing left that it can train."""
    deadline, calm = time.monotonic() + SETTLES_WITHIN_S, 0
    while calm < 10 and time.monotonic() < deadline:
        calm = calm + 1 if system.quiet() else 0
        time.sleep(0.5)  # only a lasting calm shows that nothing is left to do


@dataclass(frozen=True)
class CrashRun:
    """The kills of a run, and the audit's report."""

    seed: int
    kills: Sequence[Kill]
    counts: dict[str, int]
    """The agents' actions and answers, counted by kind."""
    report: Report | None
    """None if the run gave up, and left nothing that could be audited."""
    gave_up: str | None = None

    @property
    def result(self) -> Result:
        found = () if self.report is None else self.report.findings
        findings = tuple(f"{finding.kind}: {finding.sentence} ({finding.rule})" for finding in found)
        answers = 0 if self.report is None else self.report.answers
        return Result(self.seed, tuple(self.kills), answers, findings, self.gave_up)

    @property
    def exit_code(self) -> int:
        """0 if every kill was made, and the audit found nothing."""
        return 1 if self.gave_up or self.report is None else self.report.exit_code


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
            kills, gave_up = drive(system, windows, seed, told)
        settle(system)
        sources = Sources(
            redis_url=system.redis_url,
            trainer_url=system.stack.trainer_url,
            admin_key=ADMIN_KEY,
            checkpoint_dir=system.checkpoints,
        )
        try:
            report = audit(sources, read_answers(answers))
        except EvidenceMissing as error:
            if gave_up is None:
                raise
            logger.error("nothing can be audited: %s", error)
            report = None
        return CrashRun(seed, kills, system.agents.counts, report, gave_up)
