"""Checks of the training: whether the trainer reports, trains what arrives, and what becomes of sessions."""

from weir.doctor.facts import DeploymentFacts
from weir.doctor.problem import Found
from weir.status import TRAINER_SILENT_S
from weir.words import counted, duration

NO_VERDICT_S = 3600.0
NOTHING_NEW_S = 6 * 3600.0
UNTRAINED_SHARE = 0.5
ENOUGH_SESSIONS = 50
INTENDED = frozenset({"trained", "not_for_training", "deleted"})
"""Endings that are no reason for a warning."""


def trainer_silent(facts: DeploymentFacts) -> Found:
    """Told by Redis. If the gateway answers, it tells the same as a warning."""
    report, known = facts.redis.trainer, facts.redis.silent is None
    if not known or facts.system is not None:
        return
    if report.last_seen is None:
        yield (
            "warning",
            "no trainer has ever reported to this Redis",
            "start the trainer, or check its redis_url",
        )
    elif (silent_s := facts.now - report.last_seen) > TRAINER_SILENT_S:
        yield (
            "error",
            f"the trainer has not reported for {duration(silent_s)}; it said last: {report.waiting_for}",
            "start it again: it continues from its checkpoint",
        )


def trainer_paused(facts: DeploymentFacts) -> Found:
    if facts.system is None and facts.redis.trainer.state == "paused":
        yield (
            "warning",
            f"the trainer is paused and waits for {facts.redis.trainer.waiting_for}",
            "POST /admin/trainer/resume, once you know why",
        )


def trainers_differ(facts: DeploymentFacts) -> Found:
    """The gateway's Redis is not the one that was examined."""
    if facts.system is None or facts.redis.silent is not None:
        return
    there, here = facts.system.trainer, facts.redis.trainer
    if (there.url, there.last_seen is None) != (here.url, here.last_seen is None):
        yield (
            "error",
            f"the gateway knows the trainer at {there.url}, and Redis at {facts.redis.address} the one at "
            f"{here.url}: they use two Redis servers",
            "give all services the same WEIR_REDIS_URL",
        )


def no_verdict_for_long(facts: DeploymentFacts) -> Found:
    settled_at, waiting = facts.redis.settled_at, facts.redis.waiting
    if waiting and settled_at is not None and facts.now - settled_at > NO_VERDICT_S:
        yield (
            "warning",
            f"{counted(waiting, 'record waits', 'records wait')} for the trainer, and the last session got "
            f"its verdict {duration(facts.now - settled_at)} ago; the trainer waits for "
            f"{facts.report.waiting_for}",
            "GET /admin/pipeline says which sessions and groups are waited for",
        )


def no_version_for_long(facts: DeploymentFacts) -> Found:
    newest_at, waiting = facts.redis.newest_policy_at, facts.redis.waiting
    if waiting and newest_at is not None and facts.now - newest_at > NOTHING_NEW_S:
        yield (
            "warning",
            f"no version was published for {duration(facts.now - newest_at)}, though "
            f"{counted(waiting, 'record waits', 'records wait')}",
            "GET /admin/pipeline says what the trainer waits for",
        )


def mostly_untrained(facts: DeploymentFacts) -> Found:
    ends = {
        name.removeprefix("session:"): number
        for name, number in facts.redis.verdicts.items()
        if name.startswith("session:")
    }
    untrained = {code: number for code, number in ends.items() if code not in INTENDED}
    total = sum(untrained.values()) + ends.get("trained", 0)
    if total < ENOUGH_SESSIONS or sum(untrained.values()) < UNTRAINED_SHARE * total:
        return
    code = max(untrained, key=untrained.__getitem__)
    yield (
        "warning",
        f"{sum(untrained.values()) / total:.0%} of {total} sessions were not trained, {untrained[code]} of "
        f"them {code}",
        f"GET /sessions?verdict={code} shows them; docs/sessions.md explains each verdict",
    )


def dead_letters(facts: DeploymentFacts) -> Found:
    """The gateway tells the same, with the error, if it answers."""
    if facts.system is None and facts.redis.dead_letters:
        yield (
            "warning",
            f"the trainer could not read {counted(facts.redis.dead_letters, 'record')}: see weir:dead",
            "a newer release may read more: finish the upgrade, then run `weir audit`",
        )


CHECKS = (
    trainer_silent,
    trainer_paused,
    trainers_differ,
    no_verdict_for_long,
    no_version_for_long,
    mostly_untrained,
    dead_letters,
)
