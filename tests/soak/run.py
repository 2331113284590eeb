"""One soak: starts the system, lets agents, faults and samples run side by side, and audits at the end."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from tests.soak.agents import MOST_TURNS, PATIENCE_S, TEXT, Agent
from tests.soak.dialects import DIALECTS
from tests.soak.faults import make_faults
from tests.soak.journal import Journal
from tests.soak.memory import BEGINS, WINDOW, MemoryRow, MemorySample, judged, sample_memory
from tests.soak.result import CallRow, SoakResult
from tests.soak.system import SoakSystem, soak_system
from tests.support.gateway.running import ADMIN_KEY
from tests.support.redis_clients import redis_at
from weir.audit.audit import audit
from weir.audit.audit_sources import Sources
from weir.audit.evidence import read_answers

KEEPALIVE_S = 2.0
"""Shorter than the gateway's, so that no call meets a connection that the gateway is closing."""
TOKENS_PER_TURN = MOST_TURNS * 3 * len(TEXT)
"""The most tokens of a turn: an answer, and a prompt that repeats the whole conversation."""


class Soaked:
    """The faults and the memory samples of a soak."""

    def __init__(self, faults: Counter[str], samples: list[list[MemorySample]], turns: int) -> None:
        self.faults, self.samples = faults, samples
        self.turns = turns
        """How many answers were heard after the first window of memory."""

    def memory(self) -> tuple[MemoryRow, ...]:
        return tuple(
            judged(f"gateway {number}", samples, self.turns, TOKENS_PER_TURN)
            for number, samples in enumerate(self.samples)
        )


async def soaked(system: SoakSystem, journal: Journal, minutes: float, agents: int, seed: int) -> Soaked:
    began = time.monotonic()
    until, faults, mark = began + 60 * minutes, Counter[str](), list[int]()
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        playing = [
            Agent(f"a{seed}-{number}", seed, system.gateways, journal, http).play(until)
            for number in range(agents)
        ]
        asyncio.get_running_loop().call_later(
            60 * minutes * (BEGINS + WINDOW), lambda: mark.append(journal.turns)
        )
        sampling = asyncio.create_task(sample_memory(system.processes, began, until))
        await asyncio.gather(make_faults(system, random.Random(seed), journal, until, faults), *playing)
        samples = await sampling
    return Soaked(faults, samples, journal.turns - mark[0])


def soak(run_dir: Path, model_path: Path, minutes: float, agents: int, seed: int) -> SoakResult:
    run_dir.mkdir(parents=True, exist_ok=True)
    answers, ledger = run_dir / "answers.jsonl", run_dir / "no-checkpoints"
    ledger.mkdir()
    journal = Journal(answers)
    with soak_system(run_dir, model_path) as system:
        before = system.failures()  # `/ready` is a 503 until the engines were found
        done = asyncio.run(soaked(system, journal, minutes, agents, seed))
        journal.close()
        look_inside(system, journal, run_dir, before)
        sources = Sources(system.redis_url, None, ADMIN_KEY, ledger)
        report = audit(sources, read_answers(answers))
        evict(system, journal)
        if not audit(sources, read_answers(answers)).findings:
            journal.surprised("Redis has evicted sessions, and the audit finds nothing")
    return SoakResult(
        minutes=minutes,
        agents=agents,
        seed=seed,
        calls=tuple(_calls(journal)),
        faults=dict(done.faults),
        turns=journal.turns,
        unexpected=journal.unexpected,
        details=tuple(journal.details),
        memory=done.memory(),
        findings=tuple(f"{each.kind}: {each.sentence} ({each.rule})" for each in report.findings),
    )


def evict(system: SoakSystem, journal: Journal) -> None:
    """Have Redis evict keys, as one does that operators have not set up. Report if no gateway warns of it."""
    with redis_at(system.redis_url) as redis:
        used: Any = redis.info("memory")
        redis.config_set("maxmemory-policy", "allkeys-random")
        redis.config_set("maxmemory", used["used_memory"] * 9 // 10)
        redis.set("one", "more")
        redis.config_set("maxmemory", 0)
        redis.config_set("maxmemory-policy", "noeviction")
        stats: Any = redis.info("stats")
    deadline = time.monotonic() + PATIENCE_S
    while not all(any("has evicted" in each for each in said) for said in system.warnings()):
        if time.monotonic() > deadline:
            journal.surprised(f"{stats['evicted_keys']} keys were evicted, and a gateway does not warn of it")
            break
        time.sleep(0.5)  # gateways look every few seconds


TRIED = re.compile(r"^(\S+ \S+) .*suspects: engine-(\d+) died while the request (\w+) was tried there$", re.M)
GUILTY = re.compile(r"the request (\w+) has killed two engines")
NOTICED_WITHIN_S = 5.0
"""A gateway notices the end of an engine in this time."""


def killed_on_trial(log: str, killed_at: Sequence[Sequence[float]]) -> set[str]:
    """The requests that a gateway refused because their engine died when they were tried there, and it was
    the soak that killed it. `killed_at`: by the number of the engine, in seconds since the epoch."""
    killed = set[str]()
    for told, engine, request in TRIED.findall(log):
        at = datetime.strptime(told, "%Y-%m-%d %H:%M:%S,%f").timestamp()
        if any(0 <= at - each <= NOTICED_WITHIN_S for each in killed_at[int(engine)]):
            killed.add(request)
    return killed & set(GUILTY.findall(log))


def look_inside(system: SoakSystem, journal: Journal, run_dir: Path, before: Counter[str]) -> None:
    """Report to the journal: answers that do not end, replies with a 5xx status, exceptions in the logs, and
    refused calls of which no engine has died."""
    deadline = time.monotonic() + PATIENCE_S
    while not system.calm():
        if time.monotonic() > deadline:
            journal.surprised("answers are still in flight, although every agent has ended")
            break
        time.sleep(0.2)  # the gateway aborts the answers of clients that left
    for status, count in (system.failures() - before).items():
        journal.surprised(f"the gateways answered {count} calls with {status}")
    excused = set[str]()
    for path in run_dir.glob("gateway-*.log"):
        log = path.read_text(encoding="utf-8")
        excused |= killed_on_trial(log, [engine.killed_at for engine in system.engines])
        if found := log.count("Traceback"):
            journal.surprised(f"{path} has {found} tracebacks")
    for refusal in journal.refused[len(excused) :]:
        journal.surprised(refusal)


def _calls(journal: Journal) -> list[CallRow]:
    first = [*(dialect.name for dialect in DIALECTS), "rest"]
    kinds = sorted(journal.statuses, key=lambda kind: (first.index(kind) if kind in first else 99, kind))
    return [
        CallRow(
            kind, dict(journal.statuses[kind]), journal.quantile_ms(kind, 50), journal.quantile_ms(kind, 99)
        )
        for kind in kinds
    ]
