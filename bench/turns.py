"""Synthetic turns and sessions as a gateway records them: groups of four sessions of four turns."""

import random

from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Reward, Sampling, SessionSpec, Span, Turn

CONTEXT, OUTPUT = 356, 240
TURNS_A_SESSION = 4
SESSIONS_A_GROUP = 4
VOCABULARY = 151_936
OWNER = "0" * 64
OPENED_AT, EXPIRES_AT = 1e9, 4e9


def turns(first: int, count: int) -> list[Turn]:
    """`count` turns, beginning with turn number `first`."""
    rng = random.Random(first)
    return [_turn(rng, index) for index in range(first, first + count)]


def specs(given: list[Turn]) -> list[SessionSpec]:
    """The sessions of these turns."""
    groups = {turn.session_id: turn.group_id for turn in given}
    return [
        SessionSpec(
            session_id=session_id,
            owner=OWNER,
            task_id="task-1",
            group_id=group_id,
            group_size=SESSIONS_A_GROUP,
            created_at=OPENED_AT,
        )
        for session_id, group_id in groups.items()
    ]


def ending(spec: SessionSpec) -> tuple[Outcome, Reward]:
    outcome = Outcome(
        session_id=spec.session_id,
        status="completed",
        created_at=OPENED_AT,
        group_id=spec.group_id,
        group_size=spec.group_size,
        task_id=spec.task_id,
    )
    return outcome, Reward(session_id=spec.session_id, value=1.0, key="finish", created_at=OPENED_AT)


def _turn(rng: random.Random, index: int) -> Turn:
    session, place = divmod(index, TURNS_A_SESSION)
    used = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": OUTPUT}
    return Turn(
        turn_id=f"{index:032x}",
        session_id=f"s-{session:032x}",
        parent_id=f"{index - 1:032x}" if place else None,
        group_id=f"g-{session // SESSIONS_A_GROUP:032x}",
        task_id="task-1",
        relation="extends" if place else "root",
        context_ids=TokenIds(rng.choices(range(VOCABULARY), k=CONTEXT)),
        output_ids=TokenIds(rng.choices(range(VOCABULARY), k=OUTPUT)),
        logprobs=Logprobs(-rng.expovariate(2.0) for _ in range(OUTPUT)),
        versions=(Span(7, 0, OUTPUT),),
        sampling=Sampling(asked={"temperature": 1.0}, used=used),
        finish="stop",
        started_at=OPENED_AT + index,
        finished_at=OPENED_AT + index + 0.5,
        engine="engine-0",
        completion_id=f"chatcmpl-{index:032x}",
        prompt_digest=f"{rng.getrandbits(256):064x}",
        reply_digest=f"{rng.getrandbits(256):064x}",
        request_digest=f"{rng.getrandbits(256):064x}",
    )
