"""Reads bytes of every kind of record as earlier builds wrote them, because they must stay readable for ever.

A new schema or kind of record adds a file. No file is ever changed, because data in Redis outlives builds.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_queue.contract.codec import SCHEMA, decode, decode_spec, encode
from rollout_queue.contract.errors import UnknownSchema
from rollout_queue.contract.export_rows import ExportRow, row_from_json
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import (
    Deletion,
    LateJoin,
    Outcome,
    Reward,
    RoutedExperts,
    Sampling,
    SamplingPolicy,
    SessionSpec,
    Span,
    Turn,
    TurnImage,
)
from rollout_queue.http.probe_routes import release

GOLDEN = json.loads(Path(__file__).with_name("golden_schema_1.json").read_text(encoding="utf-8"))

FULL_TURN: dict[str, Any] = {
    "turn_id": "t2",
    "session_id": "s1",
    "parent_id": "t1",
    "group_id": "g1",
    "task_id": "k1",
    "policy": "tutor",
    "attempt": 2,
    "joined_attempt": 3,
    "joined_at": 12.5,
    "lineage": "planner",
    "relation": "retry",
    "reason": "retried",
    "context_ids": TokenIds([0, 1, 2**31 - 1]),
    "output_ids": TokenIds([4, 5, 6]),
    "logprobs": Logprobs([-0.5, -0.25, 0.0]),
    "versions": (Span(7, 0, 2), Span(8, 2, 3, engine="http://e2")),
    "sampling": Sampling(asked={"temperature": 0.0, "stop": ["."]}, used={"temperature": 1.0, "seed": None}),
    "finish": "tool_calls",
    "train": False,
    "started_at": 10.25,
    "finished_at": 11.75,
    "engine": "http://e1",
    "completion_id": "chatcmpl-1",
    "prompt_digest": "aa",
    "reply_digest": "bb",
    "request_digest": "cc",
    "retry_of": "t1",
    "orphan_of": "t3",
}
RECORDS: dict[str, Any] = {
    "turn": Turn(**FULL_TURN),
    "turn_short": Turn(
        turn_id="t1",
        session_id="s1",
        context_ids=TokenIds([1]),
        output_ids=TokenIds([]),
        logprobs=Logprobs([]),
        versions=(),
        finish="abort",
        started_at=1.0,
        finished_at=2.0,
    ),
    "reward": Reward(
        session_id="s1", value=-0.5, key="k", turn_id="t1", source="judge", created_at=3.0, late=True
    ),
    "reward_short": Reward(session_id="s1", value=0.0, key="k", created_at=3.0),
    "outcome": Outcome(
        session_id="s1",
        status="truncated",
        reason="steps",
        created_at=4.0,
        group_id="g1",
        group_size=4,
        task_id="k1",
        train=False,
    ),
    "outcome_short": Outcome(session_id="s1", status="completed", created_at=4.0),
}
SPECS: dict[str, Any] = {
    "session": SessionSpec(
        session_id="s1",
        owner="digest",
        task_id="k1",
        group_id="g1",
        group_size=4,
        policy="tutor",
        user="ann",
        train=False,
        ttl_s=60.5,
        metadata={"a": [1, None, {"b": "ü"}]},
        lineage="planner",
        sampling=SamplingPolicy(mode="allow", temperature=0.5, top_p=0.9, max_tokens=100),
        created_at=1.5,
        inferred=True,
    ),
    "session_short": SessionSpec(session_id="s1", created_at=1.5),
    "session_implicit": SessionSpec(session_id="s1", created_at=1.5, implicit=True),
}
LATER: dict[str, Any] = {
    "turn_of_a_user": msgspec.structs.replace(RECORDS["turn_short"], user="bob"),
    "turn_with_experts": msgspec.structs.replace(
        RECORDS["turn"], experts=RoutedExperts(2, 1, bytes([0, 1, 2, 3, 254, 255]))
    ),
    "turn_with_images": msgspec.structs.replace(
        RECORDS["turn"], images=(TurnImage("0" * 63 + "a", 1, 3, 64, 32, (1, 2, 4)),)
    ),
    "deletion": Deletion(session_id="s1", created_at=5.0, group_id="g1", group_size=4),
    "late_join": LateJoin(session_id="s1", created_at=3.5, group_id="g1", group_size=4),
}
"""Fields that were added to schema 1 after its first build."""


@pytest.mark.parametrize("name", [*RECORDS, *LATER])
def test_a_record_of_schema_1_is_read(name: str) -> None:
    assert decode(bytes.fromhex(GOLDEN[name])) == (RECORDS | LATER)[name]


@pytest.mark.parametrize("name", SPECS)
def test_a_session_of_schema_1_is_read(name: str) -> None:
    assert decode_spec(bytes.fromhex(GOLDEN[name])) == SPECS[name]


def test_there_is_a_golden_of_every_record() -> None:
    assert set(GOLDEN) == {*RECORDS, *LATER, *SPECS, "row"}


def test_a_field_of_a_later_build_of_the_same_schema_is_passed_over() -> None:
    for name, record in RECORDS.items():
        fields = msgspec.msgpack.decode(bytes.fromhex(GOLDEN[name])[1:])
        packed = bytes([1]) + msgspec.msgpack.encode(fields | {"from_the_future": [1, 2]})
        assert decode(packed) == record


def test_a_newer_schema_is_refused_by_name_wherever_it_stands() -> None:
    newer = bytes([SCHEMA + 1])
    for read, packed in ((decode, encode(RECORDS["turn"])), (decode_spec, encode(SPECS["session"]))):
        with pytest.raises(
            UnknownSchema, match=f"record schema {SCHEMA + 1}; this build reads schema {SCHEMA}"
        ):
            read(newer + packed[1:])
    with pytest.raises(UnknownSchema, match="row schema 2; this build reads schema 1"):
        row_from_json(json.dumps(json.loads(GOLDEN["row"]) | {"schema": 2}).encode())


def test_a_row_of_schema_1_is_read() -> None:
    row = row_from_json(GOLDEN["row"].encode())
    assert isinstance(row, ExportRow)
    same = set(FULL_TURN) - {"group_id", "started_at", "finish", "session_id", "task_id"}
    assert {name: getattr(row, name) for name in same} == {name: FULL_TURN[name] for name in same}
    assert (row.created_at, row.finish_reason) == (FULL_TURN["started_at"], FULL_TURN["finish"])
    assert (row.session.metadata, row.session.outcome and row.session.outcome.status) == (
        SPECS["session"].metadata,
        "truncated",
    )
    assert row.rewards[0].value == -0.5


def test_a_release_tells_two_builds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two source trees of one version and schema."""
    monkeypatch.setattr("rollout_queue.http.probe_routes.PACKAGE", tmp_path)
    told = list[str]()
    for text in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "module.py").write_text(text)
        release.cache_clear()
        told.append(release())
    release.cache_clear()
    assert told[0] == told[2] != told[1]
    assert f"schema {SCHEMA}, build " in told[0]
