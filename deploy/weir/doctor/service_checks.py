"""Checks of the services and their clocks, of the fleet and of the training.

services   whether they answer, agree on keys, clocks and releases, and who reaches them
fleet      which servers serve which version, and what the last push came to
training   whether the trainer reports, trains what arrives, and what becomes of sessions
"""

from collections.abc import Iterator

import msgspec

from rollout_queue.foreign_json import read_json
from rollout_queue.http.callers import LOOPBACK
from rollout_queue.protocol.conditions import INTENDED, counted, duration
from rollout_queue.protocol.gateway_messages import NO_SIGN_OF_LIFE
from weir.doctor.deployment_facts import MOST_APART_S, Check, DeploymentFacts, Found, ServiceFacts
from weir.stack.service_process import RewardStatus

SECTIONS = ("gateway", "rollout_server", "trainer")
READ_PIPELINE = "see GET /admin/pipeline, and `gateway.warnings` in docs/gateway.md"
READ_PUSH = "GET /admin/policies/{version} has each server's error, and the server's log says more"


def service_silent(facts: DeploymentFacts) -> Found:
    for service in facts.services:
        if service.silent is not None:
            yield (
                "error",
                f"{service.name} at {service.url} does not answer: {service.silent}",
                "start it, or look into its log; if it is there, this machine does not reach it",
            )


def service_unready(facts: DeploymentFacts) -> Found:
    for service in facts.services:
        if service.unready is not None:
            yield (
                "error",
                f"{service.name} is not ready: {service.unready}",
                "wait if it is starting; otherwise its log says more",
            )


def graders_not_isolated(facts: DeploymentFacts) -> Found:
    for service in facts.others:
        if service.kind == "rewards" and _not_isolated(service.body):
            yield (
                "warning",
                f"{service.name} does not isolate Python graders: the system grants it no namespaces, so "
                "they have the network and see other processes",
                "permit user namespaces to it (in containers: a seccomp profile that allows unshare), or set "
                "rewards.python.isolation to required",
            )


def _not_isolated(report: bytes) -> bool:
    try:
        return read_json(report, RewardStatus).python_isolated is False
    except msgspec.DecodeError:
        return False


def keys_differ(facts: DeploymentFacts) -> Found:
    refusing = [service.name for service in facts.services if service.key_refused]
    if refusing:
        yield (
            "error",
            f"{', '.join(refusing)} {'refuses' if len(refusing) == 1 else 'refuse'} the admin key with which "
            "the doctor, and so every other service, calls",
            "give all services the same first key in WEIR_ADMIN_KEYS (`--config` and the environment say "
            "which one the doctor uses)",
        )


def report_unreadable(facts: DeploymentFacts) -> Found:
    for service in facts.services:
        if service.report_unreadable is not None:
            yield (
                "error",
                f"this build cannot read the report of {service.name}: {service.report_unreadable}",
                "run the same release everywhere",
            )


def no_report(facts: DeploymentFacts) -> Found:
    """A service that says by itself why it is not ready needs no second finding."""
    for service in facts.services:
        if service.report_failed is not None and not service.key_refused and service.unready is None:
            yield (
                "error",
                f"{service.name} gives no report: {service.report_failed}",
                "its log says more",
            )


def clocks_apart(facts: DeploymentFacts) -> Found:
    told = {"Redis": facts.redis.clock_ahead_s} | {
        service.name: service.clock_ahead_s for service in facts.services
    }
    known = {name: ahead_s for name, ahead_s in told.items() if ahead_s is not None}
    if not known or max(known.values()) - min(known.values()) <= MOST_APART_S:
        return
    first, last = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    yield (
        "warning",
        f"clocks differ: {first} is {known[first] - known[last]:.1f} s ahead of {last}",
        "synchronise the clocks of all machines (chrony, systemd-timesyncd): sessions expire, and groups "
        "wait, by these clocks",
    )


def releases_differ(facts: DeploymentFacts) -> Found:
    told = dict(_releases(facts))
    if len(set(told.values())) > 1:
        named = ", ".join(f"{name} {release}" for name, release in sorted(told.items()))
        yield (
            "warning",
            f"services run different releases: {named}",
            "finish the upgrade (docs/operations.md says in which order)",
        )


def _releases(facts: DeploymentFacts) -> Iterator[tuple[str, str]]:
    if facts.system is not None and facts.system.release:
        yield "gateway", facts.system.release
    for service, status in facts.servers:
        if status is not None and status.release:
            yield service.name, status.release
    if facts.report.release:
        yield "trainer", facts.report.release


def default_keys(facts: DeploymentFacts) -> Found:
    known = [warning for warning in _warnings(facts) if "everybody knows the keys" in warning]
    for warning in known:
        yield "error", warning, "make keys, for instance by `openssl rand -hex 24`, and restart the services"


def listens_without_keys(facts: DeploymentFacts) -> Found:
    open_engine = facts.setting("rollout_server", "engine_key") is None
    if open_engine and facts.setting("rollout_server", "engine_host") not in (None, *LOOPBACK):
        yield (
            "warning",
            f"the engine listens on {facts.setting('rollout_server', 'engine_host')} and asks for no key",
            "set rollout_server.engine_key and gateway.engine_key (WEIR_ENGINE_KEY)",
        )
    for section in SECTIONS:
        host, keys = facts.setting(section, "host"), facts.setting(section, "admin_keys")
        if host not in (None, *LOOPBACK) and keys is not None and not keys:
            yield (
                "error",
                f"{section}.host is {host}, and {section} has no keys, so it refuses to start",
                "set WEIR_CLIENT_KEYS and WEIR_ADMIN_KEYS, or bind 127.0.0.1",
            )


def public_url_unreachable(facts: DeploymentFacts) -> Found:
    public: ServiceFacts | None = facts.public
    if public is not None and public.silent is not None and facts.gateway.silent is None:
        yield (
            "error",
            f"the gateway answers, but not at gateway.public_url, {public.url}, which agents get: "
            f"{public.silent}",
            "correct gateway.public_url, or the proxy in front of it",
        )


def gateway_warns(facts: DeploymentFacts) -> Found:
    """What the gateway itself warns of, except what other checks find as well."""
    push = facts.system.policy.push if facts.system is not None else None
    told = push is not None and push.state == "failed"  # by `push_failed`
    for warning in _warnings(facts):
        of_push = told and warning.startswith("the last ")
        if not of_push and not any(known in warning for known in ("everybody knows the keys", "maxmemory")):
            of_server = warning.startswith("server ")
            yield "warning", warning, READ_PUSH if of_server else READ_PIPELINE


def _warnings(facts: DeploymentFacts) -> tuple[str, ...]:
    return () if facts.system is None else facts.system.warnings


SLOW_PUSH_S = 900.0


def no_server(facts: DeploymentFacts) -> Found:
    system = facts.system
    if system is not None and not any(each.state == "ready" for each in system.rollout_servers):
        known = len(system.rollout_servers)
        yield (
            "error",
            "the gateway knows no engine" if not known else f"none of the {known} engines is ready",
            "start a rollout server with WEIR_GATEWAY_URL set, or name engines in gateway.engines",
        )


def server_without_version(facts: DeploymentFacts) -> Found:
    for each in facts.system.rollout_servers if facts.system is not None else ():
        if each.version is None and each.state == "ready":
            yield (
                "warning",
                f"engine {each.id} does not say which version it serves, so its turns cannot be trained",
                "run it by a rollout server, or name its version when it starts (docs/policies.md)",
            )


def server_down(facts: DeploymentFacts) -> Found:
    for each in facts.system.rollout_servers if facts.system is not None else ():
        if each.state in ("dead", "draining") or each.error:
            why = f": {each.error}" if each.error else ""
            if each.state == "ready":  # and it gets no calls
                yield (
                    "error" if each.error == NO_SIGN_OF_LIFE else "warning",
                    f"engine {each.id} gets no calls{why}",
                    "wait, if it was just started; else read its log, and restart it if it hangs",
                )
                continue
            advice = (
                f"POST /admin/rollout_servers/{each.id}/resume, if it is to take calls"
                if each.state == "draining"
                else "its log says why; a server that is gone for good can be removed by DELETE"
            )
            yield "warning", f"engine {each.id} is {each.state}{why}", advice


def server_not_registered(facts: DeploymentFacts) -> Found:
    if facts.system is None:
        return
    known = {each.url for each in facts.system.rollout_servers}
    ids = {each.id for each in facts.system.rollout_servers}
    for service, status in facts.servers:
        if service.silent is None and service.url not in known and (status is None or status.id not in ids):
            yield (
                "error",
                f"{service.name} at {service.url} runs, and the gateway does not know it",
                "set rollout_server.gateway_url (WEIR_GATEWAY_URL) and the same admin keys for both",
            )


def server_behind(facts: DeploymentFacts) -> Found:
    """A server that is ready and serves neither what the fleet serves nor what it is to serve."""
    system = facts.system
    if system is None or system.policy.serving is None:
        return
    admissible = {*system.policy.admissible, system.policy.target}
    admissible |= {pin.version for pin in system.policy.pins}
    if system.policy.canary is not None:
        admissible.add(system.policy.canary.version)
    for each in system.rollout_servers:
        if each.state == "ready" and each.version is not None and each.version not in admissible:
            yield (
                "warning",
                f"engine {each.id} serves version {each.version}, which may not answer calls; the fleet "
                f"serves {system.policy.serving}",
                "GET /admin/policies/{version} says how its push went on this server",
            )


def push_failed(facts: DeploymentFacts) -> Found:
    push = facts.system.policy.push if facts.system is not None else None
    if push is not None and push.state == "failed":
        yield (
            "error",
            f"the push of version {push.version} failed: {push.error}",
            f"GET /admin/policies/{push.version} has each server's error",
        )


def push_slow(facts: DeploymentFacts) -> Found:
    push = facts.system.policy.push if facts.system is not None else None
    if push is not None and push.state == "pushing" and facts.now - push.started_at > SLOW_PUSH_S:
        yield (
            "warning",
            f"the push of version {push.version} has gone on for {duration(facts.now - push.started_at)}",
            f"GET /admin/policies/{push.version} says what each server waits for",
        )


def fleet_held(facts: DeploymentFacts) -> Found:
    hold = facts.system.policy.hold if facts.system is not None else None
    if hold is not None:
        yield (
            "warning",
            f"the fleet has been held for {duration(facts.now - hold.since)}: {hold.reason}",
            "POST /admin/policies/release lets newer versions be served again",
        )


NO_VERDICT_S = 3600.0
NOTHING_NEW_S = 6 * 3600.0
UNTRAINED_SHARE = 0.5
ENOUGH_SESSIONS = 50


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
    untrained = {code: number for code, number in ends.items() if code not in {*INTENDED, "trained"}}
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


CHECKS: tuple[Check, ...] = (
    service_silent,
    service_unready,
    keys_differ,
    report_unreadable,
    no_report,
    clocks_apart,
    releases_differ,
    default_keys,
    listens_without_keys,
    public_url_unreachable,
    graders_not_isolated,
    gateway_warns,
    no_server,
    server_without_version,
    server_down,
    server_not_registered,
    server_behind,
    push_failed,
    push_slow,
    fleet_held,
    trainers_differ,
    no_verdict_for_long,
    no_version_for_long,
    mostly_untrained,
)
