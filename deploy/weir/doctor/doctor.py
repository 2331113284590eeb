"""Examines a deployment, and says what is wrong with it: as sentences, or as JSON.

The model is checked when services start. Their rows are shown as one table, and two digests make a problem:

SystemStatus, ServerStatus, the trainer's report ─▶ ModelRow ─▶ a table; two digests ─▶ a problem
"""

import asyncio
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from rollout_queue import clock
from rollout_queue.model_checks import TENSORS, TOKENIZER
from rollout_queue.protocol.conditions import CONDITIONS, ConditionFacts, Problem, counted, problems_in
from rollout_queue.protocol.message import TITLE, MalformedMessage, ModelCheck
from rollout_queue.protocol.trainer_messages import TrainerReport
from weir.doctor import redis_health, service_checks, this_machine
from weir.doctor.asking import gather
from weir.doctor.deployment_facts import Check, DeploymentFacts, Found, problems_of
from weir.doctor.targets import Targets

COLOURS = {"right": "green", "differs": "yellow", "refused": "red", "unknown": "yellow"}


class ModelRow(msgspec.Struct, frozen=True):
    """What one service found out about the model."""

    service: str
    check: str
    outcome: str
    detail: str


def model_rows(facts: DeploymentFacts) -> list[ModelRow]:
    """The rows of all services that answer."""
    return [
        ModelRow(service, each.check, each.outcome, each.detail)
        for service, checks in _told(facts)
        for each in checks
    ]


def table_of(rows: Sequence[ModelRow]) -> Table:
    table = Table("service", "check", "outcome", "detail", title=TITLE, title_justify="left")
    for row in rows:
        outcome = f"[{COLOURS.get(row.outcome, 'yellow')}]{row.outcome}[/]"
        table.add_row(row.service, row.check, outcome, row.detail)
    return table


def models_differ(facts: DeploymentFacts) -> Found:
    """Trainer and engines began with other tensors, so that each push will be refused."""
    told = _details(facts, TENSORS)
    trainers = told.pop("trainer", None)
    for service, detail in told.items():
        if trainers is not None and detail != trainers:
            yield (
                "error",
                f"the trainer and {service} began with different models: {trainers}, and {detail}",
                "give both the same files as trainer.model_path and rollout_server.model_path",
            )


def tokenizers_differ(facts: DeploymentFacts) -> Found:
    """The gateway makes other ids of a text than transformers."""
    told = _details(facts, TOKENIZER)
    if len(set(told.values())) > 1:
        yield (
            "warning",
            f"the gateway's tokenizer makes other ids than transformers: {told['gateway']}, and "
            f"transformers, which the trainer asked: {told['trainer']}",
            "give both the same tokenizer files in gateway.model_path and trainer.model_path; if they are "
            "the same, write tokenizer.json anew with AutoTokenizer.from_pretrained(…).save_pretrained(…)",
        )


def _details(facts: DeploymentFacts, check: str) -> dict[str, str]:
    rows = (row for row in model_rows(facts) if row.check == check and row.outcome == "right")
    return {row.service: row.detail for row in rows}


def _told(facts: DeploymentFacts) -> Iterator[tuple[str, Sequence[ModelCheck]]]:
    if facts.system is not None:
        yield "gateway", facts.system.model_checks
    for service, status in facts.servers:
        yield service.name, () if status is None else status.model_checks
    if facts.trainer is not None and facts.trainer.body:
        try:
            yield "trainer", TrainerReport.read(facts.trainer.body).model_checks or ()
        except MalformedMessage:  # of another release; `releases_differ` tells
            return


CHECKS: tuple[Check, ...] = (
    *redis_health.CHECKS,
    *service_checks.CHECKS,
    *this_machine.CHECKS,
    models_differ,
    tokenizers_differ,
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


def _condition_facts(facts: DeploymentFacts) -> ConditionFacts:
    """If the gateway answers, it says as warnings what is wrong with the trainer and its records."""
    alone = facts.system is None and facts.redis.silent is None
    return ConditionFacts(
        now=facts.now,
        trainer=facts.redis.trainer if alone else None,
        dead_letters=facts.redis.dead_letters if alone else 0,
        redis=redis_health.redis_use(facts),
    )


def examined(facts: DeploymentFacts, seconds: float = 0.0) -> Examination:
    """What the checks find in the facts."""
    problems = [problem for check in CHECKS for problem in problems_of(check, facts)]
    problems += problems_in(_condition_facts(facts))
    problems.sort(key=lambda problem: problem.severity != "error")
    return Examination(
        ok=not problems,
        problems=problems,
        checks=len(CHECKS) + len(CONDITIONS),
        seconds=round(seconds, 2),
        gateway=facts.gateway.url,
        redis=facts.redis.address,
        model=model_rows(facts),
    )


def show(examination: Examination, console: Console) -> None:
    """Each problem as a sentence, with what to do below it."""
    for problem in examination.problems:
        colour = "red" if problem.severity == "error" else "yellow"
        console.print(f"[{colour}]{problem.severity}[/]: ", end="")
        console.print(f"{problem.sentence} [{problem.check}]", markup=False, highlight=False)
        console.print(f"    {problem.advice}", markup=False, highlight=False)
    if examination.model:
        console.print(table_of(examination.model), highlight=False)
    done = f"{examination.checks} checks of {examination.gateway} and {examination.redis}"
    found = counted(len(examination.problems), "problem") if examination.problems else "nothing is wrong"
    console.print(f"{done} in {examination.seconds:.1f} s: {found}", markup=False, highlight=False)
