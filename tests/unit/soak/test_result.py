"""A soak with unexpected answers, growing memory or findings of the audit fails."""

from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from rollout_queue.redis.session_heads import OUTPUT_BYTES
from tests.soak.dialects import CHAT, DIALECTS, MESSAGES, NotWhole
from tests.soak.faults import FAULTS
from tests.soak.memory import MIB, TURN_OVERHEAD_BYTES, MemoryRow, MemorySample, judged
from tests.soak.result import CallRow, SoakResult, lines, write
from tests.soak.run import killed_on_trial

FLAT = MemoryRow("gateway 0", 100, 109, 130, 110)
GOOD = SoakResult(
    minutes=30,
    agents=64,
    seed=1,
    calls=tuple(CallRow(dialect.name, {"200": 9}, 1, 2) for dialect in DIALECTS),
    faults=dict.fromkeys(FAULTS, 1),
    turns=36,
    unexpected=0,
    details=(),
    memory=(FLAT,),
    findings=(),
)


def test_a_good_soak_is_shown_and_written(tmp_path: Path) -> None:
    assert (GOOD.exit_code, lines(GOOD)[-1]) == (0, "all well")
    write(GOOD, tmp_path / "soak.json")
    assert msgspec.json.decode((tmp_path / "soak.json").read_bytes(), type=SoakResult) == GOOD


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unexpected": 2}, "unexpected: 2"),
        ({"findings": ("lost: a turn",)}, "findings of the audit: 1"),
        ({"memory": (FLAT, MemoryRow("gateway 1", 100, 111, 130, 110))}, "the memory of gateway 1 grows"),
        ({"calls": GOOD.calls[1:]}, "no call in chat: the soak shows nothing"),
        ({"faults": {**GOOD.faults, "standstill": 0}}, "no standstill: the soak shows nothing"),
    ],
)
def test_any_fault_fails_the_soak(changes: dict[str, object], said: str) -> None:
    result = msgspec.structs.replace(GOOD, **changes)
    assert result.exit_code == 1
    assert lines(result)[-1] == f"FAULT: {said}"


def test_a_soak_of_less_than_two_minutes_does_not_judge_memory() -> None:
    grown = (MemoryRow("gateway 0", 100, 111, 130, 110),)
    assert not msgspec.structs.replace(GOOD, minutes=1, memory=grown).faulty


def test_memory_may_grow_by_a_tenth_and_by_what_the_cache_fills() -> None:
    def row(last: int) -> MemoryRow:
        samples = [MemorySample(n / 100, (last if n > 80 else 100) * MIB) for n in range(101)]
        return judged("g", samples, turns=1024, tokens_per_turn=256)

    filled = 1024 * (TURN_OVERHEAD_BYTES + 256 * OUTPUT_BYTES) // MIB
    assert row(110 + filled).flat
    assert not row(111 + filled).flat


def test_the_peak_of_one_moment_is_no_growth() -> None:
    samples = [MemorySample(n / 100, (900 if n == 95 else 100) * MIB) for n in range(101)]
    found = judged("g", samples, turns=0, tokens_per_turn=1)
    assert (found.flat, found.highest) == (True, 900)


def test_a_stream_without_an_end_is_not_whole() -> None:
    piece = b'data: {"id": "c", "choices": [{"delta": {"content": "a"}}]}\n\n'
    assert CHAT.read(piece + b"data: [DONE]\n\n", True) == ("a", "c")
    begun = b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m"}}\n\n'
    assert MESSAGES.read(begun + b'data: {"type": "message_stop"}\n\n', True) == ("", "m")
    for dialect, raw in (
        (CHAT, piece),
        (MESSAGES, begun),
        (CHAT, piece + b'data: {"error": {"type": "x"}}\n\n'),
    ):
        with pytest.raises(NotWhole):
            dialect.read(raw, True)


@pytest.mark.parametrize(
    ("killed_at", "told", "found"),
    [
        (100.0, 101.5, {"abc"}),
        (100.0, 107.0, set()),  # it died of something else
        (102.0, 101.5, set()),
    ],
)
def test_a_request_is_excused_if_the_soak_killed_the_engine_where_it_was_tried(
    killed_at: float, told: float, found: set[str]
) -> None:
    now = datetime.fromtimestamp(told)
    at = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03}"
    log = (
        f"{at} WARNING gateway.fleet.suspects: engine-1 died while the request abc was tried there\n"
        f"{at} WARNING gateway.fleet.suspects: engine-1 died while the request def was tried there\n"
        f"{at} ERROR gateway.fleet.suspects: the request abc has killed two engines, and is refused\n"
    )
    assert killed_on_trial(log, [[], [killed_at], [told]]) == found
