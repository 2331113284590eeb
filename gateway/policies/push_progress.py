"""Notes in the shared plan what servers have proved, and ends a push or opens a canary once they have."""

import logging
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from gateway.fleet.fleet import Fleet
from gateway.policies.attempts import Attempts
from gateway.policies.server_reload import PushOrder
from rollout_queue import clock
from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.contract.serving_plan import CanaryReport, PushState, ServingPlan
from rollout_queue.redis.plan_store import PlanEvent, ServingRegister
from rollout_queue.redis.policy_register import PolicyRegister

logger = logging.getLogger(__name__)

ERROR_CHARACTERS = 2000
"""The longest error of a push that is stored."""
NOT_LOADED = "its servers did not load it"
BARE = "bare engines cannot load a policy: put a rollout server in front of each"


class PushProgress:
    """Every method may raise StorageUnavailable."""

    def __init__(
        self, serving: ServingRegister, register: PolicyRegister, fleet: Fleet, max_version_lag: int
    ) -> None:
        self._serving, self._register, self._fleet = serving, register, fleet
        self._max_version_lag = max_version_lag

    async def admit(self, order: PushOrder) -> None:
        """A server has proved the version. If it is the fleet's, it may answer calls."""
        if order.own or any((each.push, each.version) == order.key for each in self._fleet.plan.admissible):
            return
        if order.record.state != "serving":
            await self._register.store(replace(order.record, state="serving"))
        former = self._fleet.serving
        plan = await self._change(lambda plan: plan.proved(order.version, order.push, self._max_version_lag))
        if plan.serving != former:
            logger.info("version %s is served", plan.serving)

    async def judge_push(
        self, plan: ServingPlan, order: PushOrder, attempts: Sequence[Attempts], capacity: float
    ) -> bool:
        """End the push if no server is waited for. Returns whether it has ended. `attempts` has one of every
        server that takes part."""
        if not plan.pushing or not all(each.settled and each.order.key == order.key for each in attempts):
            return False
        states = {each.noted.state for each in attempts}
        if not self._fleet.servers:
            await self.admit(order)
        if "proved" in states or not self._fleet.servers:
            await self._end(order.push, "serving", capacity)
        elif states != {"unavailable"}:
            refused = states <= {"refused", "unavailable"}
            await self._end(order.push, "failed", capacity, _errors(attempts) or BARE, refused=refused)
            logger.error("version %d was refused by every server", order.version)
            if states <= {"refused"} and order.record.state == "published":
                await self._free_number(order.record)
        else:
            return False
        return True

    async def _free_number(self, record: PolicyRecord) -> None:
        """Every server has refused the version. One of its canary may have sampled with it before."""
        if record.version not in {each.version for each in await self._serving.last_canaries()}:
            await self._register.forget(record)

    async def judge_canary(self, plan: ServingPlan, attempts: Sequence[Attempts]) -> None:
        """Open the canary once its servers have proved the version, or roll it back if they cannot."""
        canary = plan.active_canary
        if canary is None or canary.state != "opening":
            return
        own = [each for each in attempts if each.order.push == canary.id]
        if not own or not all(each.settled for each in own):
            return
        states = {each.noted.state for each in own}
        if "proved" in states:
            await self._change(lambda plan: plan.canary_opened(canary.id, clock.now()))
            logger.info("the canary of version %d is open", canary.version)
        elif states != {"unavailable"}:
            report = CanaryReport(reason=f"{NOT_LOADED}: {_errors(own)}")
            await self._change(lambda plan: plan.canary_ended(canary.id, "rolled_back", report, clock.now()))

    async def _end(
        self,
        push: int,
        state: PushState,
        capacity: float,
        error: str | None = None,
        *,
        refused: bool = False,
    ) -> None:
        ended = partial(ServingPlan.ended, error=error, capacity=capacity, refused=refused)
        now = clock.now()
        await self._change(lambda plan: ended(plan, push, state, now))

    async def _change(self, event: PlanEvent) -> ServingPlan:
        plan = await self._serving.change(event)
        self._fleet.adopt(plan)
        return plan


def _errors(attempts: Sequence[Attempts]) -> str:
    found = "; ".join(f"{each.noted.server}: {each.noted.error}" for each in attempts if each.noted.error)
    return found[:ERROR_CHARACTERS]
