"""The keys and arguments of the script that ends a session."""

import msgspec

from rollout_queue.contract.codec import encode
from rollout_queue.contract.head import TERMS
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Verdict
from rollout_queue.redis import keys
from rollout_queue.redis.connection.replicas import Argument


def terms_of(source: Outcome | SessionSpec) -> bytes:
    """The terms as bytes: those of an outcome equal those of its session."""
    return msgspec.json.encode([getattr(source, name) for name in TERMS])


def outcome_arguments(
    outcome: Outcome, reward: Reward | None, verdict: Verdict | None
) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of APPEND_OUTCOME."""
    named: list[str] = [keys.session(outcome.session_id), keys.STREAM, keys.DEADLINES]
    named += [keys.VERDICTS, keys.DELETED, keys.SETTLED]
    return named, [
        outcome.session_id,
        encode(outcome),
        f"r:{reward.key}" if reward else "",
        encode(reward) if reward else b"",
        msgspec.json.encode(verdict) if verdict else b"",
        verdict.code if verdict else "",
        repr(reward.value) if reward else "",
        terms_of(outcome),
    ]
