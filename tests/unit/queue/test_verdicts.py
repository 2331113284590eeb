"""A verdict has the same text whether the gateway or the trainer gives it."""

from typing import Any

import pytest

from gateway.sessions.verdicts import session_verdict, turn_verdict
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Sampling, SessionSpec, Turn, Verdict
from rollout_queue.contract.stream import Entry
from trainer_service.groups.assemble import Assembler, Rules
from trainer_service.rows.rows import exclusions

HELD = {"sampling": Sampling(used={"constraint": "tool_choice"})}


def turn(turn_id: str, **fields: Any) -> Turn:
    return Turn(
        turn_id=turn_id,
        session_id="s",
        context_ids=TokenIds([1]),
        output_ids=TokenIds(),
        logprobs=Logprobs(),
        versions=(),
        started_at=1.0,
        finished_at=2.0,
        **({"finish": "stop"} | fields),
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"orphan_of": "later"}, "orphan_retry: turn later asked the same again"),
        ({"finish": "abort"}, "aborted: the call ended before its answer was complete"),
        ({"train": False, **HELD}, "not_for_training: sampled under a constraint"),
        ({"train": True, **HELD}, None),
        (
            {"train": False, "side_call": "title"},
            "not_for_training: a title that the agent's harness asked for",
        ),
        ({"train": True, "side_call": "title"}, None),
        (
            {"train": False, "finish": "abort", **HELD},
            "aborted: the call ended before its answer was complete",
        ),
    ],
)
def test_the_trainer_excludes_a_turn_with_the_gateways_words(fields: Any, expected: str | None) -> None:
    made = turn("t", **fields)
    head = SessionHead(spec=SessionSpec(session_id="s", created_at=1.0), turns=(made,))
    ready = Verdict(code="ready")
    foretold, passed = turn_verdict(head, made, ready), exclusions([made]).get("t")
    assert foretold == (passed or ready)
    assert (passed and f"{passed.code}: {passed.detail}") == expected


def test_a_session_that_is_not_for_training_ends_with_the_gateways_words() -> None:
    outcome = Outcome(session_id="s", status="completed", created_at=2.0, train=False)
    head = SessionHead(spec=SessionSpec(session_id="s", train=False, created_at=1.0), outcome=outcome)
    assembler = Assembler(Rules(vocab_size=10, train_truncated=False, group_wait_s=1.0))
    assembler.add([Entry("1-0", outcome)])
    (group,) = assembler.complete(caught_up=True)
    assert group.members[0].verdict == session_verdict(head, None)
