"""The rules of the audit, one by one: each test changes one thing in evidence that is correct."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_queue.contract.head import Tombstone
from rollout_queue.contract.records import Verdict, VerdictCode
from weir.audit.audit import notes_of, totals_of
from weir.audit.audit_facts import (
    ClientAnswer,
    Evidence,
    GroupFact,
    Ledger,
    LedgerRow,
    SessionFact,
    StreamFact,
    TurnFact,
)
from weir.audit.audit_rules import findings_of
from weir.audit.evidence import EvidenceMissing, read_answers
from weir.importing import rows_of


def verdict(code: VerdictCode, step: int | None = None, version: int | None = None) -> Verdict:
    return Verdict(code=code, step=step, version=version)


STONE = Tombstone(session_id="s1", created_at=100.0, deleted_at=200.0, turns=1, rewards=0)
TRAINED = verdict("trained", 1, 4)


def turn(turn_id: str, **fields: Any) -> TurnFact:
    given: dict[str, Any] = {"tokens": 3, "generation": hash(turn_id), "versions": (0,)}
    return TurnFact(turn_id=turn_id, **(given | fields))


def session(session_id: str, *turns: TurnFact, **fields: Any) -> SessionFact:
    given: dict[str, Any] = {
        "group_id": None,
        "ends": frozenset({"r:finish", "outcome"}),
        "unheard": frozenset(),
        "verdict": None,
        "unreadable": {},
    }
    return SessionFact(session_id=session_id, turns=turns, **(given | fields))


def row(step: int = 1, version: int = 4, **fields: Any) -> LedgerRow:
    given: dict[str, Any] = {"durable": True, "turns": ["t1"], "sessions": ["s1"], "tokens": 3}
    return LedgerRow(step=step, version=version, **(given | fields))


def evidence(*sessions: SessionFact, **fields: Any) -> Evidence:
    """Evidence about these sessions; by default, about a trained one, `s1`, and one that waits, `s2`."""
    sessions = sessions or (
        session("s1", turn("t1", verdict=TRAINED), verdict=TRAINED, group_id="g"),
        session("s2", turn("t2"), group_id="g"),
    )
    counts: dict[str, int] = {}
    for each in sessions:
        for kind, given in [("session", each.verdict), *(("turn", t.verdict) for t in each.turns)]:
            if given is not None:
                counts[f"{kind}:{given.code}"] = counts.get(f"{kind}:{given.code}", 0) + 1
    entries = fields.pop("entries", WAITING)
    rows = fields.pop("rows", (row(),))
    stream = StreamFact(
        entries=entries, unreadable=fields.pop("unread", {}), pending=0, undelivered=3, vanished=0
    )
    whole: dict[str, Any] = {
        "sessions": {each.session_id: each for each in sessions},
        "known_sessions": frozenset(each.session_id for each in sessions),
        "stream": stream,
        "ledger": Ledger(rows, "here"),
        "groups": {"g": GroupFact(2, frozenset({"s1", "s2"}))},
        "counts_before": counts,
        "counts_after": counts,
        "policies": frozenset({0}),
    }
    return Evidence(**(whole | fields))


def forgetful(
    sessions: int = 2, turns: int = 3, tokens: int = 9, counted: int | None = None, **fields: Any
) -> Evidence:
    """The default evidence and a second step whose sessions are all forgotten: two sessions, three turns,
    nine tokens. A third forgotten session was never trained."""
    forgotten = {
        "session:trained": sessions,
        "turn:trained": turns,
        "tokens:trained": tokens,
        "session:failed": 1,
    }
    counts = {
        "session:trained": 1 + sessions,
        "turn:trained": 1 + turns if counted is None else counted,
        "session:failed": 1,
    }
    given: dict[str, Any] = {
        "rows": (row(), row(2, 5, turns=["t7", "t8", "t9"], sessions=["f0", "f1"], tokens=9)),
        "counts_before": counts,
        "counts_after": counts,
        "forgotten_before": forgotten,
        "forgotten_after": forgotten,
    }
    return evidence(**(given | fields))


EMPTY: dict[str, Any] = {"turns": [], "sessions": [], "tokens": 0}
WAITING: dict[str, dict[str, tuple[str, ...]]] = {
    "s2": {"t:t2": ("5-0",), "r:finish": ("6-0",), "outcome": ("7-0",)}
}


def ledger(*rows: LedgerRow) -> Evidence:
    """The default evidence with these rows."""
    return evidence(rows=rows)


def with_entry(session_id: str, field: str, *entry_ids: str) -> Evidence:
    """The default evidence with these entries of one field in the stream."""
    entries = {name: dict(fields) for name, fields in WAITING.items()}
    entries.setdefault(session_id, {})[field] = entry_ids
    return evidence(entries=entries)


def group(size: int, *members: str, forgotten: int = 0) -> Evidence:
    """The default evidence with another group."""
    return evidence(groups={"g": GroupFact(size, frozenset(members), forgotten)})


def without_entry(field: str) -> Evidence:
    return evidence(entries={"s2": {name: ids for name, ids in WAITING["s2"].items() if name != field}})


def one(turn_fact: TurnFact, session_verdict: Verdict | None, **fields: Any) -> Evidence:
    """Evidence of a single session with one turn."""
    alone = session("s1", turn_fact, verdict=session_verdict)
    return evidence(alone, **({"entries": {}, "rows": (), "groups": {}} | fields))


def told(given: Evidence) -> set[tuple[str, str, str]]:
    return {finding.identity for finding in findings_of(given)}


def test_evidence_that_is_whole_finds_nothing() -> None:
    whole = evidence()
    assert findings_of(whole) == []
    totals = totals_of(whole)
    assert {name: msgspec.to_builtins(fate) for name, fate in totals.fates.items()} == {
        "trained": {"sessions": 1, "turns": 1, "tokens": 3},
        "waiting": {"sessions": 1, "turns": 1, "tokens": 3},
    }
    assert totals.ledger_tokens == totals.trained_tokens == 3


KINDS = {
    "duplicated": "trained_twice appended_twice reward_twice recorded_twice in_two_sessions "
    "steps_not_growing versions_not_growing",
    "lost": "dropped acknowledged_before_the_checkpoint end_dropped no_image no_head step_missing "
    "member_gone answered",
    "unexplained": "other_step verdict_denies barred no_verdict session_over verdict_and_entry unknown_entry "
    "deleted_and_there unreadable not_durable tokens sessions unknown_turns counter forgotten "
    "member_unlisted too_many",
}
"""The rules by the kind of their findings."""
FAULTS = {
    "trained_twice, turn t1: a turn in two rows": ledger(row(), row(2, 5)),
    "trained_twice, turn t1: a turn twice in one row": ledger(row(turns=["t1", "t1"], tokens=6)),
    "appended_twice, turn t2: two entries of one turn": with_entry("s2", "t:t2", "5-0", "8-0"),
    "reward_twice, session s2 r:finish: two entries of one reward": with_entry(
        "s2", "r:finish", "5-0", "8-0"
    ),
    "dropped, turn t2: a turn without entry or verdict": without_entry("t:t2"),
    "acknowledged_before_the_checkpoint, turn t1: a verdict of no durable step": ledger(),
    "acknowledged_before_the_checkpoint, turn t1: a verdict of a step without it": ledger(row(**EMPTY)),
    "other_step, turn t1: a verdict that names another version": ledger(row(version=9)),
    "verdict_denies, turn t1: trained against its verdict": one(
        turn("t1", verdict=verdict("stale")), verdict("stale"), rows=(row(),)
    ),
    "verdict_denies, turn t1: its session was closed by the gateway": one(
        turn("t1"), verdict("expired"), rows=(row(),)
    ),
    "barred, turn t1: trained although it was aborted": one(
        turn("t1", barred="its call was aborted", verdict=TRAINED), TRAINED, rows=(row(),)
    ),
    "no_verdict, turn t1: trained and acknowledged without a verdict": one(
        turn("t1"), TRAINED, rows=(row(),)
    ),
    "dropped, turn t1: judged with a session that does not know it": one(
        turn("t1"), verdict("zero_advantage")
    ),
    "dropped, turn t1: left out of its group": one(turn("t1"), verdict("group_incomplete")),
    "session_over, turn t1: appended behind its session's end": one(
        turn("t1"), TRAINED, entries={"s1": {"t:t1": ("5-0",)}}
    ),
    "verdict_and_entry, turn t1: settled and still owed": with_entry("s1", "t:t1", "5-0"),
    "unknown_entry, session s2 t:t9: its session does not know it": with_entry("s2", "t:t9", "9-0"),
    "unknown_entry, session s9 t:t9: nobody knows the session": with_entry("s9", "t:t9", "9-0"),
    "recorded_twice, turn b: a generation recorded twice": one(
        turn("t1"), None, sessions={"s1": session("s1", turn("a", generation=7), turn("b", generation=7))}
    ),
    "in_two_sessions, turn t1: one turn in two sessions": evidence(
        session("s1", turn("t1")), session("s2", turn("t1"))
    ),
    "end_dropped, session s2 r:finish: a reward whose entry is lost": without_entry("r:finish"),
    "end_dropped, session s2 outcome: an outcome whose entry is lost": without_entry("outcome"),
    "no_image, session s2 b: an image that is gone": evidence(
        session("s2", turn("t2"), images=frozenset({"a", "b"})),
        missing_images=frozenset({"b", "c"}),
        rows=(),
        groups={},
    ),
    "no_head, session s3: a session without a head": evidence(known_sessions=frozenset({"s1", "s2", "s3"})),
    "deleted_and_there, session s1: a deleted session that is there again": evidence(
        tombstones={"s1": STONE}
    ),
    "unreadable, session s2 t:t3: a record that nobody can read and nobody holds": evidence(
        session("s2", turn("t2"), unreadable={"t:t3": b"?"}), rows=(), groups={}
    ),
    "step_missing, step 2: a ledger that begins late": evidence(
        session("s2", turn("t2")), groups={}, rows=(row(2, **EMPTY),)
    ),
    "step_missing, step 3: a ledger with a hole": ledger(row(), row(3, 5, **EMPTY)),
    "steps_not_growing, step 1: a step that comes twice": ledger(row(), row(1, 5, **EMPTY)),
    "versions_not_growing, step 2: a version that comes twice": ledger(row(), row(2, 4, **EMPTY)),
    "not_durable, step 1: a row that is not durable": ledger(row(durable=False)),
    "tokens, step 1: a row with more tokens than its turns": ledger(row(tokens=4)),
    "tokens, step 1: a row with fewer tokens than its turns": ledger(row(tokens=2)),
    "sessions, step 1: a row of a session that has no turn in it": ledger(row(sessions=["s1", "s2"])),
    "unknown_turns, step 1: a row with a turn that nobody knows": ledger(row(turns=["t1", "t9"], tokens=6)),
    "counter, counter session:trained: a counter that is too high": evidence(
        counts_before={"session:trained": 2}, counts_after={"session:trained": 2}
    ),
    "counter, counter turn:trained: a counter that was never raised": evidence(
        counts_before={}, counts_after={}
    ),
    "forgotten, forgotten turns: a trained turn more than the ledger has, forgotten": forgetful(turns=4),
    "forgotten, forgotten turns: a trained turn less than the ledger has, forgotten": forgetful(turns=2),
    "forgotten, forgotten tokens: other tokens than the ledger has, forgotten": forgetful(tokens=11),
    "forgotten, forgotten sessions: other sessions than the ledger has, forgotten": forgetful(sessions=1),
    "counter, counter turn:trained: a counter that is wrong with what is forgotten": forgetful(counted=7),
    "unknown_turns, step 1: and no trained turn is forgotten": evidence(
        rows=(row(turns=["t1", "t9"], tokens=6),),
        forgotten_before={"session:failed": 1},
        forgotten_after={"session:failed": 1},
    ),
    "member_gone, group g lists the session s3, which does not exist: one more is forgotten": group(
        4, "s1", "s2", "s3", "s4", forgotten=1
    ),
    "answered, session f0: three others are forgotten": forgetful(
        answers=tuple(ClientAnswer(f"f{number}") for number in range(4))
    ),
    "member_unlisted, group g does not list its member s2": group(2, "s1"),
    "member_gone, group g lists the session s3, which does not exist": group(3, "s1", "s2", "s3"),
    "too_many, group g was made for 1 sessions but has 2": group(1, "s1", "s2"),
    "answered, session s2 t:t9: a turn that a client was told of": evidence(
        answers=(ClientAnswer("s2", turn_id="t9"),)
    ),
    "answered, session s9: a session that a client was told of": evidence(answers=(ClientAnswer("s9"),)),
    "answered, session s2 outcome: an end that a client was told of": evidence(
        session("s2", turn("t2"), ends=frozenset()),
        rows=(),
        groups={},
        entries={"s2": {"t:t2": ("5-0",)}},
        answers=(ClientAnswer("s2", finished=True),),
    ),
}
"""By the rule and the subject of the finding, and what is wrong."""


@pytest.mark.parametrize("fault", FAULTS)
def test_what_must_not_be_is_found_and_named(fault: str) -> None:
    rule, subject = fault.split(": ")[0].split(", ", 1)
    (kind,) = (kind for kind, rules in KINDS.items() if rule in rules.split())
    assert (kind, rule, subject) in told(FAULTS[fault])


FINE = {
    "trained by a durable step and not yet acknowledged": ledger(
        row(), row(2, 5, turns=["t2"], sessions=["s2"])
    ),
    "closed by the gateway while its group waits": one(
        turn("t1"), verdict("failed"), entries={"s1": {"t:t1": ("5-0",), "outcome": ("6-0",)}}
    ),
    "a second outcome, of a session that expired unrewarded": one(
        turn("t1"), verdict("expired"), entries={"s1": {"t:t1": ("5-0",), "outcome": ("6-0", "7-0")}}
    ),
    "a turn that came too late for its group": one(
        turn("t1", verdict=verdict("group_incomplete")), verdict("group_incomplete")
    ),
    "trained, with a turn of its own fate": evidence(
        session(
            "s1",
            turn("t1", verdict=TRAINED),
            turn("t2", verdict=verdict("aborted"), barred="its call was aborted"),
            verdict=TRAINED,
        ),
        groups={},
        entries={},
    ),
    "steps that commands have made": evidence(
        rows=tuple(row(step, 3 + step, turns=[], sessions=[], tokens=9) for step in (1, 2)),
        groups={},
        sessions={},
        known_sessions=frozenset(),
        entries={},
        counts_before={},
        counts_after={},
    ),
    "a record set aside": one(turn("t1", set_aside=True), verdict("invalid")),
    "a record that no build could read, set aside": evidence(
        session("s2", turn("t2"), unreadable={"t:t3": b"?"}), rows=(), groups={}, dead_letters={b"?": "1-0"}
    ),
    "a record of a newer build that waits": evidence(
        session("s2", turn("t2"), unreadable={"t:t3": b"?"}), rows=(), groups={}, unread={"9-0": b"?"}
    ),
    "deleted after it was trained": evidence(
        session("s2", turn("t2")),
        known_sessions=frozenset({"s1", "s2"}),
        tombstones={"s1": STONE},
        groups={"g": GroupFact(2, frozenset({"s1", "s2"}))},
        counts_before={"session:trained": 1, "turn:trained": 1, "session:deleted": 1},
        counts_after={"session:trained": 1, "turn:trained": 1, "session:deleted": 1},
        answers=(ClientAnswer("s1", turn_id="t1"),),
        entries=WAITING | {"s1": {"deletion": ("9-0",), "t:t1": ("3-0",)}},
    ),
    "forgotten after it was trained, and reconciled": forgetful(),
    "forgotten, with a deleted session in the same step": forgetful(
        rows=(row(), row(2, 5, turns=["t7", "t8", "t9", "td"], sessions=["f0", "f1", "sd"], tokens=12)),
        tombstones={"sd": Tombstone(session_id="sd", created_at=1.0, deleted_at=2.0, turns=1, rewards=0)},
        counts_before={"session:trained": 3, "turn:trained": 4, "session:failed": 1, "session:deleted": 1},
        counts_after={"session:trained": 3, "turn:trained": 4, "session:failed": 1, "session:deleted": 1},
    ),
    "forgotten while the heads were read": forgetful(
        forgotten_before={"session:trained": 1, "turn:trained": 1, "tokens:trained": 3}
    ),
    "members of a group that are forgotten": group(4, "s1", "s2", "s3", "s4", forgotten=2),
    "answers of sessions that may be forgotten": forgetful(
        answers=(ClientAnswer("f0"), ClientAnswer("f1", turn_id="t9"), ClientAnswer("f2", finished=True))
    ),
    "counters that grew while the heads were read": evidence(
        counts_before={}, counts_after={"session:trained": 3, "turn:trained": 9}
    ),
    "a late reward has no entry": evidence(
        session("s1", turn("t1", verdict=TRAINED), verdict=TRAINED, unheard=frozenset({"r:late"})),
        groups={},
        entries={},
        answers=(ClientAnswer("s1", reward_key="late"),),
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_what_may_be_is_not_called_a_fault(case: str) -> None:
    assert findings_of(FINE[case]) == []


def test_what_is_forgotten_is_told() -> None:
    told_of = forgetful(answers=(ClientAnswer("f0"),))
    totals = totals_of(told_of)
    assert totals.forgotten_sessions == 3
    assert msgspec.to_builtins(totals.forgotten_trained) == {"sessions": 2, "turns": 3, "tokens": 9}
    (note,) = notes_of(told_of)
    assert note.startswith("1 sessions of the given answers do not exist")


def test_versions_that_no_policy_names_are_told_and_no_fault() -> None:
    odd = one(turn("t1", versions=(0, 7), verdict=verdict("stale")), verdict("stale"))
    assert findings_of(odd) == []
    assert notes_of(odd) == ["turns were sampled by versions without a policy record: 7"]


@pytest.mark.parametrize(
    ("given", "numbers", "faults"),
    [
        (TRAINED, 3, set()),
        (TRAINED, None, set()),
        (TRAINED, 4, {"numbers"}),
        (TRAINED, -1, {"numbers"}),
        (verdict("stale"), 3, {"numbers"}),
    ],
)
def test_numbers_of_a_step_lie_beside_its_verdict(
    given: Verdict, numbers: int | None, faults: set[str]
) -> None:
    rows = (row(),) if given is TRAINED else ()
    found = told(one(turn("t1", verdict=given, numbers=numbers), given, rows=rows))
    assert {rule for _, rule, _ in found} == faults


@pytest.mark.parametrize(
    ("taught", "subjects"),
    [({"s1": 4}, set()), ({"s1": 5}, {"session s1"}), ({"s2": 4, "gone": 4}, {"session s2", "session gone"})],
)
def test_the_index_of_trained_sessions_says_what_their_verdicts_say(
    taught: Mapping[str, int], subjects: set[str]
) -> None:
    found = told(evidence(taught=taught))
    assert {(rule, subject) for _, rule, subject in found} == {("index", subject) for subject in subjects}


def test_answers_that_cannot_be_read_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    for line, why in (
        (b'{"session_id": "caf\xe9"}', "byte 20, 0xe9"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b"{", ""),
    ):
        path.write_bytes(b"\n" + line)
        with pytest.raises(EvidenceMissing, match=f"answers.jsonl, line 2: .*{why}"):
            read_answers(path)


def test_rows_of_another_encoding_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"schema": 99}\n{"schema": 1, "session_id": "caf\xe9"}\n')
    first, second = rows_of([path])
    assert "schema 99" in first.problem
    assert second.location.endswith(":2")
    assert "0xe9, is not UTF-8" in second.problem
