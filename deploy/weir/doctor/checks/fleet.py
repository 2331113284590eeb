"""Checks of the fleet: which servers serve which version, and what the last push came to."""

from rollout_queue.protocol.status import NO_SIGN_OF_LIFE
from weir.doctor.facts import DeploymentFacts
from weir.doctor.problem import Found
from weir.words import duration

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


CHECKS = (
    no_server,
    server_without_version,
    server_down,
    server_not_registered,
    server_behind,
    push_failed,
    push_slow,
    fleet_held,
)
