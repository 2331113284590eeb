"""The changes that begin and end a canary."""

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from gateway.fleet.fleet import Fleet
from rollout_queue import clock
from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.contract.serving_plan import Canary, CanaryGates, ServingPlan, Sticky
from rollout_queue.redis.plan_store import ServingRegister
from rollout_queue.redis.policy_register import PolicyRegister


def canary_servers(fleet: Fleet, plan: ServingPlan, share: float) -> tuple[str, ...]:
    """The servers that answer this share of the calls: at least one, and never all; none if the fleet cannot
    be divided."""
    pinned = {pin.server for pin in plan.pins}
    live = sorted(each.id for each in fleet.rollout_servers if each.live and each.id not in pinned)
    count = min(max(1, round(share * len(live))), len(live) - 1)
    return tuple(live[: max(0, count)])


def canary_begun(
    plan: ServingPlan,
    version: int,
    servers: tuple[str, ...],
    share: float,
    sticky: Sticky,
    gates: CanaryGates,
    *,
    automatic: bool = False,
) -> ServingPlan:
    """The plan with a new canary against the served version; the same plan while something else goes on."""
    if plan.active_canary is not None or plan.pushing or plan.serving is None:
        return plan
    now = clock.now()
    canary = Canary(
        id=plan.next_id(now),
        version=version,
        baseline=plan.serving,
        servers=servers,
        share=share,
        sticky=sticky,
        gates=gates,
        automatic=automatic,
        started_at=now,
    )
    return replace(plan, canary=canary)


def untried(records: Iterable[PolicyRecord], plan: ServingPlan) -> PolicyRecord | None:
    """The newest version after the served one, unless it was pushed or tried before."""
    newest = max(records, key=lambda record: record.version, default=None)
    served = -1 if plan.serving is None else plan.serving
    if newest is None or newest.version <= served or newest.state != "published":
        return None
    tried = {each.version for each in (plan.push, plan.canary) if each is not None}
    return None if newest.version in tried else newest


def newest_policy(records: Iterable[PolicyRecord]) -> PolicyRecord | None:
    """The newest version that no canary has rolled back."""
    sound = (record for record in records if record.state != "failed")
    return max(sound, key=lambda record: record.version, default=None)


async def known_policies(register: PolicyRegister, serving: ServingRegister) -> list[PolicyRecord]:
    """Every registered version, ascending. One that was never served, or is newer than what the servers are
    to serve, is `failed` if its last canary was rolled back."""
    records = await register.records()
    plan = await serving.read()
    failed = _rolled_back(await serving.last_canaries())  # read last, so that no end is missed
    target = -1 if plan.target is None else plan.target
    return [_judged(records[version], failed, target) for version in sorted(records)]


def _judged(record: PolicyRecord, failed: Collection[int], target: int) -> PolicyRecord:
    judged = record.state == "published" or record.version > target
    return replace(record, state="failed") if judged and record.version in failed else record


def _rolled_back(canaries: Sequence[Canary]) -> set[int]:
    """The versions whose last canary with a decision was rolled back. `canaries`: the newest first."""
    ends = {each.version: each.state for each in reversed(canaries) if each.state != "superseded"}
    return {version for version, state in ends.items() if state == "rolled_back"}
