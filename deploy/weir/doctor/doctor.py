"""Examines a deployment, and says what is wrong with it: as sentences, or as JSON."""

import asyncio
from collections.abc import Sequence

import msgspec
from rich.console import Console

from rollout_queue import clock
from weir.doctor import model_table
from weir.doctor.asking import gather
from weir.doctor.checks import fleet, machine, redis, services, training
from weir.doctor.facts import DeploymentFacts
from weir.doctor.model_table import ModelRow
from weir.doctor.problem import Check, Problem, problems_of
from weir.doctor.targets import Targets
from weir.words import counted

CHECKS: tuple[Check, ...] = (
    *redis.CHECKS,
    *services.CHECKS,
    *fleet.CHECKS,
    *training.CHECKS,
    *machine.CHECKS,
    *model_table.CHECKS,
)


class Examination(msgspec.Struct, frozen=True):
    """The result of all checks."""

    ok: bool
    problems: Sequence[Problem]
    """Errors before warnings."""
    checks: int
    seconds: float
    gateway: str
    redis: str
    model: Sequence[ModelRow] = ()
    """What the services found out about the model when they started."""

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1


def examine(targets: Targets) -> Examination:
    """Ask every part of the deployment, and look at the answers. Changes nothing."""
    began_at = clock.monotonic()
    facts = asyncio.run(gather(targets))
    return examined(facts, clock.monotonic() - began_at)


def examined(facts: DeploymentFacts, seconds: float = 0.0) -> Examination:
    """What the checks find in the facts."""
    problems = [problem for check in CHECKS for problem in problems_of(check, facts)]
    problems.sort(key=lambda problem: problem.severity != "error")
    return Examination(
        ok=not problems,
        problems=problems,
        checks=len(CHECKS),
        seconds=round(seconds, 2),
        gateway=facts.gateway.url,
        redis=facts.redis.address,
        model=model_table.model_rows(facts),
    )


def show(examination: Examination, console: Console) -> None:
    """Each problem as a sentence, with what to do below it."""
    for problem in examination.problems:
        colour = "red" if problem.severity == "error" else "yellow"
        console.print(f"[{colour}]{problem.severity}[/]: ", end="")
        console.print(f"{problem.sentence} [{problem.check}]", markup=False, highlight=False)
        console.print(f"    {problem.advice}", markup=False, highlight=False)
    if examination.model:
        console.print(model_table.table_of(examination.model), highlight=False)
    done = f"{examination.checks} checks of {examination.gateway} and {examination.redis}"
    found = counted(len(examination.problems), "problem") if examination.problems else "nothing is wrong"
    console.print(f"{done} in {examination.seconds:.1f} s: {found}", markup=False, highlight=False)
