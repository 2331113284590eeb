"""An export can be imported, as the same sessions or as new ones with the same content."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout_queue.redis import key_names
from tests.support.gateway.exports import episode, export
from tests.support.gateway.running import ADMIN_KEY, RunningGateway, emptied
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until
from weir.__main__ import app

runner = CliRunner()


def record(gateway: RunningGateway) -> None:
    """Make sessions of every kind, as they occur in a deployment."""
    for number, member in enumerate(
        gateway.post("/groups", {"size": 2, "group_id": "g", "user": "ann"}).json()["sessions"]
    ):
        gateway.chat(f"try {number}", session=member, user="bob")
        reward = {"value": 0.25, "key": "style", "source": "judge"}
        gateway.post(f"/sessions/{member['session_id']}/reward", reward)
        gateway.finish(member, reward=float(number))
    failed = episode(gateway, session_id="failed", metadata={"a": {"b": [1, None, "ü"]}})
    gateway.finish(failed, status="failed", reason="no sandbox")
    gateway.finish(gateway.session(session_id="turnless", group_id="h", group_size=2), status="abandoned")
    retried = episode(gateway, session_id="retried", turns=1)
    gateway.chat("once", session=retried)
    gateway.chat("once", session=retried, headers={"x-stainless-retry-count": "1"})
    episode(gateway, session_id="open", turns=3)


def save(gateway: RunningGateway, path: Path, form: str = "jsonl") -> Path:
    asked = {"format": form, "empty": "true"}
    path.write_bytes(gateway.get("/admin/export", key=ADMIN_KEY, params=asked).content)
    return path


def weir_import(gateway: RunningGateway, *arguments: str | Path) -> Any:
    pool: Any = gateway.redis.connection_pool.connection_kwargs
    url = f"redis://{pool['host']}:{pool['port']}/{pool['db']}"
    return runner.invoke(app, ["import", *map(str, arguments), "--redis-url", url])


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without verdicts, and in one order for the sessions of a group, which have equal times."""
    for row in rows:
        del row["verdict"], row["session"]["verdict"]
    return sorted(rows, key=lambda row: str(row["session_id"]))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_comes_out_goes_in_and_comes_out_the_same(
    gateway: RunningGateway, tmp_path: Path, form: str
) -> None:
    record(gateway)
    before, file = export(gateway, empty=True), save(gateway, tmp_path / "export", form)
    stream = gateway.redis.xlen(key_names.STREAM)
    emptied(gateway.redis)
    done = weir_import(gateway, file)
    assert done.exit_code == 0, done.output
    assert "6 sessions were imported, with 10 turns" in done.output
    assert told(export(gateway, empty=True)) == told(before)
    assert gateway.redis.xlen(key_names.STREAM) == stream
    for name, code in (("failed", "failed"), ("turnless", "abandoned"), ("open", "open")):
        assert gateway.get(f"/sessions/{name}").json()["verdict"]["code"] == code
    (group,) = {row["session"]["verdict"]["code"] for row in export(gateway) if row["group_id"] == "g"}
    assert group == "ready"
    assert gateway.call("DELETE", "/admin/users/ann/data", key=ADMIN_KEY).json()["deleted"]["sessions"] == 2


def test_rows_that_say_nothing_of_a_turns_user_are_taken_too(gateway: RunningGateway, tmp_path: Path) -> None:
    record(gateway)
    rows = export(gateway, empty=True)
    for row in rows:
        del row["turn_user"]
    (file := tmp_path / "old").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    emptied(gateway.redis)
    assert weir_import(gateway, file).exit_code == 0
    assert {row["turn_user"] for row in export(gateway)} == {None}
    assert len(export(gateway, empty=True)) == len(rows)


def test_a_second_import_changes_nothing(gateway: RunningGateway, tmp_path: Path) -> None:
    record(gateway)
    file = save(gateway, tmp_path / "export")
    for _ in range(2):
        stream, rows = gateway.redis.xlen(key_names.STREAM), export(gateway, empty=True)
        done = weir_import(gateway, file)
        assert (done.exit_code, "6 sessions exist already" in done.output) == (0, True)
        assert (gateway.redis.xlen(key_names.STREAM), export(gateway, empty=True)) == (stream, rows)


def test_as_new_the_same_is_there_twice_under_names_of_its_own(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    record(gateway)
    file, before = save(gateway, tmp_path / "export"), export(gateway)
    for _ in range(2):  # the second import finds the sessions of the first
        assert weir_import(gateway, file, "--as-new", "again-").exit_code == 0
    rows = export(gateway)
    assert len(rows) == 2 * len(before)
    names = {row["turn_id"] for row in rows}
    assert names == {row["turn_id"] for row in before} | {f"again-{row['turn_id']}" for row in before}
    copy = gateway.get("/sessions/again-open?tokens=true").json()
    assert [turn["parent_id"] for turn in copy["turns"][1:]] == [
        turn["turn_id"] for turn in copy["turns"][:-1]
    ]
    original = gateway.get("/sessions/open?tokens=true").json()
    assert [t["output_ids"] for t in copy["turns"]] == [t["output_ids"] for t in original["turns"]]
    assert {row["group_id"] for row in rows} == {None, "g", "again-g"}
    orphans = [turn["verdict"]["code"] for turn in gateway.get("/sessions/again-retried").json()["turns"]]
    assert orphans.count("orphan_retry") == 1


def test_what_was_deleted_stays_deleted(gateway: RunningGateway, tmp_path: Path) -> None:
    record(gateway)
    file = save(gateway, tmp_path / "export")
    gateway.call("DELETE", "/sessions/open")
    gateway.call("DELETE", "/admin/users/bob/data", key=ADMIN_KEY)
    done = weir_import(gateway, file)
    assert "3 sessions were deleted before and not imported" in done.output
    assert {row["verdict"]["code"] for row in export(gateway) if "turn_id" not in row} == {"deleted"}
    assert len([row for row in export(gateway) if "turn_id" not in row]) == 3
    # A deleted user's sessions are not imported under new names either.
    done = weir_import(gateway, file, "--as-new", "again-")
    assert "2 sessions were deleted before" in done.output


def test_an_expired_session_that_was_rewarded_late_counts_in_a_replay(
    timed: RunningGateway, turned: TurnedClock, tmp_path: Path
) -> None:
    session = timed.session(session_id="slow", ttl_s=60)
    timed.chat(path="/sessions/slow/v1/chat/completions")
    timed.post("/sessions/slow/finish", {"status": "completed"})
    turned.turn(60)
    wait_until(lambda: timed.get("/sessions/slow").json()["verdict"]["code"] == "expired")
    assert timed.post("/sessions/slow/reward", {"value": 1.0}).json()["late"] is True
    file = save(timed, tmp_path / "export")
    emptied(timed.redis)
    assert weir_import(timed, file).exit_code == 0
    view = timed.get(f"/sessions/{session['session_id']}").json()
    assert (view["verdict"]["code"], view["reward"], view["rewards"][0]["late"]) == ("ready", 1.0, False)


# What is wrong with a file


def lines(gateway: RunningGateway, tmp_path: Path) -> tuple[list[str], Path]:
    for name in ("a", "b", "c"):
        episode(gateway, session_id=name)
    file = save(gateway, tmp_path / "export.jsonl")
    emptied(gateway.redis)
    return file.read_text().splitlines(), file


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda line: line[: len(line) // 2], "not a row"),
        (
            lambda line: json.dumps(json.loads(line) | {"schema": 2}),
            "row schema 2; this build reads schema 1",
        ),
        (lambda line: json.dumps(json.loads(line) | {"logprobs": [0.0]}), "output ids but 1 logprobs"),
        (lambda line: json.dumps(json.loads(line) | {"output_ids": [2**40]}), "not a row"),
        (lambda line: json.dumps(json.loads(line) | {"parent_id": "nobody"}), "which is missing"),
        (lambda line: json.dumps(json.loads(line) | {"user": "not an id"}), "is not a valid id"),
        (lambda line: '{"error": {"message": "Redis"}}', "not a row"),
        (lambda line: "", "has 2 turns, but 1 are given"),
    ],
)
def test_a_bad_row_is_named_and_stops_nothing(
    gateway: RunningGateway, tmp_path: Path, change: Any, why: str
) -> None:
    good, file = lines(gateway, tmp_path)
    file.write_text("\n".join([*good[:2], change(good[2]), *good[3:]]) + "\n")
    done = weir_import(gateway, file)
    assert done.exit_code == 1
    assert f"{file}:" in done.output
    assert why in done.output
    assert "2 sessions were imported, with 4 turns" in done.output
    assert {row["session_id"] for row in export(gateway)} == {"a", "c"}


def test_strict_stops_at_the_first(gateway: RunningGateway, tmp_path: Path) -> None:
    good, file = lines(gateway, tmp_path)
    file.write_text("\n".join([*good[:4], "nonsense", *good[4:]]) + "\n")
    done = weir_import(gateway, file, "--strict")
    assert f"{file}:5: not a row" in str(done.exception)
    assert {row["session_id"] for row in export(gateway)} == {
        "a"
    }  # session b may have more rows, so that it is not imported yet


def test_a_session_may_begin_in_one_file_and_end_in_the_next(gateway: RunningGateway, tmp_path: Path) -> None:
    good, _ = lines(gateway, tmp_path)
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text("\n".join(good[:3]) + "\n")
    two.write_text("\n".join(good[3:]) + "\n")
    assert weir_import(gateway, two).exit_code == 1  # only a part of session b is here, and it is refused
    done = weir_import(gateway, one, two)
    assert (done.exit_code, "1 session exists already" in done.output) == (0, True)
    assert {row["session_id"] for row in export(gateway)} == {"a", "b", "c"}


def test_a_group_with_missing_members_is_told(gateway: RunningGateway, tmp_path: Path) -> None:
    members = gateway.post("/groups", {"size": 2}).json()["sessions"]
    gateway.chat(path=f"/sessions/{members[0]['session_id']}/v1/chat/completions")
    gateway.post(f"/sessions/{members[1]['session_id']}/finish", {"status": "failed"})
    file = tmp_path / "export.jsonl"
    file.write_bytes(gateway.get("/admin/export", key=ADMIN_KEY).content)
    emptied(gateway.redis)
    assert "1 group is incomplete" in weir_import(gateway, file).output
