"""Posts rewards, and waits for a gateway that is away."""

import logging
import random

from reward_service.dispatch.attempt import SessionReward
from reward_service.dispatch.gateway import GatewayAway, RewardOutcome, SessionGateway
from rollout_queue import clock

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""The pause before a reward that the gateway did not take is posted again; it doubles each time."""
POSTS = 12
"""How often a reward is posted while the gateway cannot take it; with pauses of up to a minute."""


def pause_s(first_s: float, failures: int, limit_s: float) -> float:
    """A pause that doubles with each failure, up to a limit, and is shortened at random by up to a half."""
    return min(first_s * 2.0 ** min(failures, 60), limit_s) * random.uniform(0.5, 1.0)


class RewardPoster:
    """Posts the rewards of all rules."""

    def __init__(self, gateway: SessionGateway, limit_s: float) -> None:
        self._gateway, self._limit_s = gateway, limit_s

    async def post(self, session_id: str, reward: SessionReward, key: str, source: str) -> RewardOutcome:
        """Post again while the gateway is away, so that the session need not be graded again. Raises
        GatewayFailure."""
        for post in range(POSTS - 1):
            try:
                return await self._gateway.reward(session_id, reward.value, key, source, reward.turn_id)
            except GatewayAway as error:
                logger.warning("the reward of session %s waits: %s", session_id, error)
            await clock.sleep(pause_s(FIRST_PAUSE_S, post, self._limit_s))
        return await self._gateway.reward(session_id, reward.value, key, source, reward.turn_id)
