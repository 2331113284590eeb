"""Rewards and outcomes of sessions over REST.

POST …/reward, …/finish ──▶ the stream
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, FiniteFloat

from gateway.errors import InvalidRequest, ObjectNotFound, StateConflict
from gateway.rest.access import client_of
from gateway.rest.bodies import RestBody
from gateway.rest.shapes import Finished, Rewarded
from gateway.rest.views import reward_view
from gateway.sessions.session_service import no_session
from rollout_queue import clock
from rollout_queue.contract.errors import RewardsTooLarge, SessionUnknown, TooManyRewards
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.ids import new_id
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Status, Verdict
from rollout_queue.http.json_routes import JsonRoute

FINISH_KEY = "finish"
"""The key of the reward that POST …/finish stores."""


REWARDS_SHOWN = 10
"""The reply to a reward has so many rewards, the newest. `GET /sessions/{id}` has all of them."""


class RewardBody(RestBody):
    value: FiniteFloat
    turn_id: str | None = Field(None, max_length=200)
    key: str | None = Field(None, min_length=1, max_length=200)
    source: str | None = Field(None, max_length=200)


class FinishBody(RestBody):
    status: Literal["completed", "truncated", "failed", "abandoned"]
    reward: FiniteFloat | None = None
    reason: str | None = Field(None, max_length=2000)


router = APIRouter(tags=["rewards"], route_class=JsonRoute)


@router.post("/sessions/{session_id}/reward", responses={200: {"model": Rewarded}})
async def reward_session(session_id: str, body: RewardBody, request: Request) -> Response:
    """Add a reward to a session, or to the one call that `turn_id` names. The reply has the newest ones."""
    gateway, caller = client_of(request)
    head = await gateway.sessions.head(session_id, caller, turns=body.turn_id is not None)
    reward = Reward(
        session_id=head.spec.session_id,
        value=body.value,
        key=body.key or new_id(),
        turn_id=_turn_named(head, body.turn_id),
        source=body.source,
        created_at=clock.now(),
    )
    with _stored(session_id, "value"):
        stored = await gateway.writer.append_reward(reward)
    if (stored.value, stored.turn_id) != (reward.value, reward.turn_id):
        raise StateConflict(f"reward {reward.key!r} exists with another value or turn", param="key")
    head = await gateway.sessions.head(session_id, caller, turns=False)
    rewards = [reward_view(each) for each in head.rewards[-REWARDS_SHOWN:]]
    return JSONResponse(
        {"session_id": session_id, "reward": head.reward, "rewards": rewards, "late": stored.late}
    )


@router.post("/sessions/{session_id}/finish", responses={200: {"model": Finished}})
async def finish_session(session_id: str, body: FinishBody, request: Request) -> Response:
    """End a session. `completed` and `truncated` sessions still wait for a reward if they have none."""
    gateway, caller = client_of(request)
    head = await gateway.sessions.head(session_id, caller)
    outcome = _outcome(head.spec, body.status, body.reason)
    reward = None
    if body.reward is not None:
        if _finish_reward(head) not in (None, body.reward):
            raise StateConflict(f"session {session_id} has another final reward", param="reward")
        reward = Reward(
            session_id=head.spec.session_id, value=body.reward, key=FINISH_KEY, created_at=outcome.created_at
        )
    verdict = None
    if body.status in ("failed", "abandoned"):
        verdict = Verdict(code=cast(Any, body.status), detail=body.reason or f"finished as {body.status}")
    with _stored(session_id, "reward"):
        stored = await gateway.writer.append_outcome(outcome, reward, verdict)
    await gateway.admission.session_ended(head.spec)
    head = await gateway.sessions.head(session_id, caller)
    verdict = await gateway.sessions.verdict(head)
    same_again = stored.status == body.status and _finish_reward(head) == body.reward
    if stored != outcome and not same_again:
        if verdict.code == "expired":
            raise StateConflict(f"session {session_id} has expired: {verdict.detail}", code="session_expired")
        raise StateConflict(f"session {session_id} is finished as {stored.status}", param="status")
    return JSONResponse(
        {
            "session_id": session_id,
            "state": head.state,
            "status": stored.status,
            "reward": head.reward,
            "verdict": msgspec.to_builtins(verdict),
        }
    )


@contextmanager
def _stored(session_id: str, param: str) -> Iterator[None]:
    """Raises ObjectNotFound when the session was removed after the route had read it, and InvalidRequest when
    it has too many rewards, or when their sum, with the one in the field `param`, could become infinite."""
    try:
        yield
    except SessionUnknown as error:
        raise no_session(session_id) from error
    except RewardsTooLarge as error:
        raise InvalidRequest(str(error), param=param) from error
    except TooManyRewards as error:
        raise InvalidRequest(str(error), param=param, code="rewards_limit") from error


def _outcome(spec: SessionSpec, status: Status, reason: str | None) -> Outcome:
    return Outcome(
        session_id=spec.session_id,
        status=status,
        reason=reason,
        created_at=clock.now(),
        group_id=spec.group_id,
        group_size=spec.group_size,
        task_id=spec.task_id,
        train=spec.train,
    )


def _finish_reward(head: SessionHead) -> float | None:
    return next((each.value for each in head.rewards if each.key == FINISH_KEY), None)


def _turn_named(head: SessionHead, name: str | None) -> str | None:
    """The id of the turn with this id or completion id. Raises ObjectNotFound; InvalidRequest for several."""
    if name is None:
        return None
    if name in head.by_id:
        return name
    turn_ids = [turn.turn_id for turn in head.turns if turn.completion_id == name]
    if not turn_ids:
        raise ObjectNotFound(f"session {head.spec.session_id} has no turn {name!r}", param="turn_id")
    if len(turn_ids) > 1:
        raise InvalidRequest(f"{name!r} has {len(turn_ids)} turns", param="turn_id", code="ambiguous_turn")
    return turn_ids[0]
