"""Records are checked when they are made, and are the same after encoding and decoding."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_queue.contract.codec import decode, decode_spec, encode
from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Reward, RoutedExperts, Sampling, SessionSpec, Span, Turn
from tests.support.queue.records import turn


@given(
    context=st.lists(st.integers(0, 2**31 - 1)),
    sampled=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-(2.0**100), 0, width=32))),
    asked=st.dictionaries(st.text(), st.integers(-10, 10) | st.text() | st.none()),
)
def test_a_turn_survives_the_wire(
    context: list[int], sampled: list[tuple[int, float]], asked: dict[str, Any]
) -> None:
    record = turn(
        context_ids=TokenIds(context),
        output_ids=TokenIds(token for token, _ in sampled),
        logprobs=Logprobs(logprob for _, logprob in sampled),
        versions=(Span(7, 0, len(sampled)),),
        sampling=Sampling(asked=asked),
    )
    assert decode(encode(record)) == record


def test_rewards_outcomes_and_sessions_survive_the_wire() -> None:
    reward = Reward(session_id="s", key="k", value=0.5, turn_id="t", created_at=1.0)
    outcome = Outcome(session_id="s", status="failed", reason="boom", created_at=2.0, group_size=4)
    spec = SessionSpec(session_id="s", metadata={"a": [1, {"b": None}]}, created_at=3.0)
    assert decode(encode(reward)) == reward
    assert decode(encode(outcome)) == outcome
    assert decode_spec(encode(spec)) == spec


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"logprobs": Logprobs([-0.5])}, "2 output ids but 1 logprobs"),
        ({"context_ids": TokenIds([-1])}, "negative"),
        ({"output_ids": TokenIds([4, -5])}, "negative"),
        ({"logprobs": Logprobs([-0.5, float("nan")])}, "not finite"),
        ({"logprobs": Logprobs([-0.5, float("inf")])}, "not finite"),
        ({"logprobs": Logprobs([-0.5, float("-inf")])}, "not finite"),
        ({"versions": (Span(0, 0, 1),)}, "end at 1"),
        ({"versions": (Span(0, 0, 1), Span(1, 0, 2))}, "tile"),
        ({"versions": ()}, "end at 0"),
    ],
)
def test_a_turn_that_contradicts_itself_cannot_be_made(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRecord, match=complaint):
        turn(**fields)
    assert turn(logprobs=Logprobs([-3.4e38, 3.4e38])).logprobs.finite, "the largest are"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_is_finite(value: float) -> None:
    with pytest.raises(InvalidRecord, match="finite"):
        Reward(session_id="s", key="k", value=value, created_at=1.0)


def test_a_contradiction_on_the_wire_is_caught_at_decode() -> None:
    packed = encode(turn()).replace(b"\xa8logprobs\xc4\x08", b"\xa8logprobs\xc4\x04")
    with pytest.raises(InvalidRecord):
        decode(packed)


@pytest.mark.parametrize("packed", [b"", b"\x01", b"\x01\x80", b"\x01\xa3abc"])
def test_bytes_that_are_no_record_are_refused(packed: bytes) -> None:
    with pytest.raises(InvalidRecord):
        decode(packed)


@given(cut=st.integers(min_value=0, max_value=200))
def test_a_record_cut_anywhere_is_refused(cut: int) -> None:
    packed = encode(turn())
    if cut < len(packed):
        with pytest.raises(InvalidRecord):
            decode(packed[:cut])


def int32(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


@pytest.mark.parametrize(("largest", "item_bytes"), [(255, 1), (256, 2), (65535, 2)])
def test_experts_are_packed_into_few_bytes_and_survive_the_wire(largest: int, item_bytes: int) -> None:
    experts = RoutedExperts.of_int32(int32(0, 1, 2, 3, 4, largest), 3)
    assert (experts.rows, experts.width, experts.item_bytes) == (3, 2, item_bytes)
    numbers = memoryview(experts.packed).cast("B" if item_bytes == 1 else "H").tolist()
    assert numbers == [0, 1, 2, 3, 4, largest]
    assert experts.last(1).packed == experts.packed[-2 * item_bytes :]
    assert experts.last(9) == experts
    record = turn(experts=experts)
    assert decode(encode(record)) == record


@pytest.mark.parametrize(
    ("numbers", "rows"), [((0, -1), 1), ((0, 65536), 1), ((0, 1, 2), 2), ((), 2), ((1,), 0)]
)
def test_what_is_no_record_of_experts_is_refused(numbers: tuple[int, ...], rows: int) -> None:
    with pytest.raises(ValueError, match="expert"):
        RoutedExperts.of_int32(int32(*numbers), rows)


def test_a_turn_has_experts_of_no_more_tokens_than_it_can() -> None:
    four = RoutedExperts.of_int32(int32(1, 2, 3, 4), 4)
    assert turn(experts=four).experts == four
    five = RoutedExperts.of_int32(int32(1, 2, 3, 4, 5), 5)
    assert turn(experts=five, parent_id="t0").experts == five
    with pytest.raises(InvalidRecord, match="experts of 5 tokens, not 4"):
        turn(experts=five)
    with pytest.raises(InvalidRecord, match="whole number"):
        RoutedExperts(2, 1, b"abc")
    with pytest.raises(InvalidRecord, match="2 times 3 bytes"):
        RoutedExperts(2, 3, b"abcdef")


SAMPLED = f"00-{'a' * 32}-{'b' * 16}-01"


def test_a_record_without_a_trace_has_the_bytes_of_before_whose_reader_skips_one() -> None:
    fields: Any = msgspec.msgpack.decode(encode(turn())[1:])
    assert "trace" not in fields
    packed = encode(turn(trace=SAMPLED))
    traced: Any = msgspec.msgpack.decode(packed[1:])
    assert list(traced) == [*fields, "trace"]
    assert decode(packed) == turn(trace=SAMPLED)
    names = [name for name in Turn.__struct_fields__ if name != "trace"]
    old = msgspec.defstruct("OldTurn", [(name, Any, None) for name in names], tag="turn", kw_only=True)
    read: Any = msgspec.msgpack.decode(packed[1:], type=old)
    assert read.turn_id == "t1"
