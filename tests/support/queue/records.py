"""Records of a session as a gateway would append them, with the fields that a test names."""

from typing import Any

from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Span, Turn


def spec(session_id: str = "s1", **fields: Any) -> SessionSpec:
    return SessionSpec(session_id=session_id, created_at=100.0, **fields)


def turn(turn_id: str = "t1", session_id: str = "s1", **fields: Any) -> Turn:
    given: dict[str, Any] = {
        "context_ids": TokenIds([1, 2, 3]),
        "output_ids": TokenIds([4, 5]),
        "logprobs": Logprobs([-0.5, -0.25]),
        "versions": (Span(0, 0, 2),),
        "finish": "stop",
        "started_at": 100.0,
        "finished_at": 101.0,
    }
    return Turn(turn_id=turn_id, session_id=session_id, **(given | fields))


def outcome(session_id: str = "s1", **fields: Any) -> Outcome:
    return Outcome(session_id=session_id, created_at=102.0, **({"status": "completed"} | fields))


def reward(key: str = "k", session_id: str = "s1", **fields: Any) -> Reward:
    return Reward(session_id=session_id, key=key, created_at=102.0, **({"value": 1.0} | fields))
