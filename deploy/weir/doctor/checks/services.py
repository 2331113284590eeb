"""Checks of all services: whether they answer, agree on keys, clocks and releases, and who reaches them."""

from collections.abc import Iterator

import msgspec

from rollout_queue.foreign_json import read_json
from rollout_queue.http.keys import LOOPBACK
from weir.doctor.facts import MOST_APART_S, DeploymentFacts, ServiceFacts
from weir.doctor.problem import Found
from weir.stack.probes import RewardStatus

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


CHECKS = (
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
)
