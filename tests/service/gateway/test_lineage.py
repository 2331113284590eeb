"""From a session to what a step used of its tokens, and from a version back to what taught it, over HTTP."""

import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rollout_queue.contract.packed_tokens import TrainedTokens
from rollout_queue.contract.published_policy import PolicyRecord, TrainedStep
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.stream_reader import StreamReader
from tests.support.claimed import claimed_reader
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, RunningGateway


@pytest.fixture
def trainer(gateway: RunningGateway) -> StreamReader:
    return claimed_reader(gateway.redis)


def tokens(count: int, advantage: float, ratios: Sequence[float] | None = None) -> bytes:
    packed = None if ratios is None else struct.pack(f"<{count}e", *ratios)
    return TrainedTokens(count, struct.pack("<f", advantage), packed).pack()


def step(trainer: StreamReader, number: int, advantages: dict[str, float], *, ratio: float = 1.0) -> None:
    """The trainer trains everything that it has not read in step `number`, which makes the version of the
    same number. `advantages` are by session."""
    entries = trainer.read(1000, 0.01)
    turns = [entry.record for entry in entries if isinstance(entry.record, Turn)]
    verdict = Verdict(code="trained", step=number, version=number)
    sizes = {(each.session_id, each.turn_id): len(each.output_ids) for each in turns}
    packed = {
        (session_id, turn_id): tokens(size, advantages[session_id], [ratio] * size)
        for (session_id, turn_id), size in sizes.items()
    }
    made = TrainedStep(
        step=number,
        version=number,
        base=number - 1,
        turns=len(turns),
        sessions=len(advantages),
        tokens=sum(sizes.values()),
    )
    verdicts = Verdicts(dict.fromkeys(advantages, verdict), dict.fromkeys(sizes, verdict), packed, [made])
    trainer.acknowledge([entry.entry_id for entry in entries], verdicts)


def published(gateway: RunningGateway, *versions: int) -> None:
    for version in versions:
        record = PolicyRecord(version=version, location=None, created_at=time.time())
        gateway.redis.hset(key_names.POLICIES, str(version), msgspec.json.encode(record))


def group(gateway: RunningGateway, group_id: str, rewards: Sequence[float], turns: int = 1) -> list[str]:
    """A group whose sessions have ended with these rewards. Returns their ids."""
    opened = gateway.post("/groups", {"size": len(rewards), "group_id": group_id, "task_id": "sum"}).json()
    for session, reward in zip(opened["sessions"], rewards, strict=True):
        for number in range(turns):
            assert gateway.chat(f"question {number}", session=session).status_code == 200
        gateway.finish(session, reward=reward)
    return [session["session_id"] for session in opened["sessions"]]


def admin(gateway: RunningGateway, path: str) -> Any:
    reply = gateway.get(path, key=ADMIN_KEY)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_trained_turn_shows_what_its_step_used_of_each_token(
    gateway: RunningGateway, trainer: StreamReader
) -> None:
    good, bad = group(gateway, "g", [1.0, 0.0])
    (before,) = gateway.turns({"session_id": good})
    assert before["training"] is None
    step(trainer, 7, {good: 0.5, bad: -0.5}, ratio=1.25)
    (turn,) = gateway.turns({"session_id": good})
    size = turn["output_len"]
    assert size > 1
    assert turn["training"] == {"step": 7, "version": 7, "advantages": [0.5] * size, "ratios": [1.25] * size}
    plain = gateway.get(f"/sessions/{good}").json()
    assert "training" not in plain["turns"][0]


def test_numbers_that_cannot_be_read_hide_no_session(gateway: RunningGateway, trainer: StreamReader) -> None:
    """A newer build may have written them, or a build before this one has written none."""
    good, bad = group(gateway, "g", [1.0, 0.0])
    step(trainer, 7, {good: 0.5, bad: -0.5})
    (turn,) = gateway.turns({"session_id": good})
    field = f"n:{turn['turn_id']}"
    for packed in (b"", b"\x02newer", b"\x01\xff", tokens(1, 0.5, [1.0]), None):
        if packed is None:
            gateway.redis.hdel(key_names.session(good), field)
        else:
            gateway.redis.hset(key_names.session(good), field, packed)
        (turn,) = gateway.turns({"session_id": good})
        unknown = {"step": 7, "version": 7, "advantages": None, "ratios": None}
        assert turn["training"] == unknown, packed
        assert len(admin(gateway, "/admin/policies/7/lineage")["data"]) == 2, packed


def test_a_version_leads_back_to_the_turns_that_taught_it(
    gateway: RunningGateway, trainer: StreamReader
) -> None:
    """Version 3 was published after steps 2 and 3; the trainer is away."""
    for number, turns in ((1, 1), (2, 2), (3, 1)):
        good, bad = group(gateway, f"g{number}", [1.0, 0.0], turns)
        step(trainer, number, {good: 0.5, bad: -0.5})
    published(gateway, 1, 3)
    found = admin(gateway, "/admin/policies/3/lineage")
    assert [(each["step"], each["version"], each["turns"]) for each in found["steps"]] == [
        (2, 2, 4),
        (3, 3, 2),
    ]
    assert found["version"] == 3
    assert found["next_cursor"] is None
    assert [each["step"] for each in found["data"]] == [2] * 4 + [3] * 2
    assert {each["group_id"] for each in found["data"]} == {"g2", "g3"}
    assert {(each["reward"], each["advantage_mean"]) for each in found["data"]} == {(1.0, 0.5), (0.0, -0.5)}
    for each in found["steps"]:
        own = [turn["tokens"] for turn in found["data"] if turn["step"] == each["step"]]
        assert sum(own) == each["tokens"]
    (turn,) = gateway.turns({"session_id": good})
    assert turn["turn_id"] in {each["turn_id"] for each in found["data"]}


def test_pages_of_a_lineage_have_each_turn_once(gateway: RunningGateway, trainer: StreamReader) -> None:
    for number in (1, 2):
        good, bad = group(gateway, f"g{number}", [1.0, 0.0], turns=1 + number % 2)
        step(trainer, number, {good: 0.5, bad: -0.5})
    published(gateway, 2)
    whole = admin(gateway, "/admin/policies/2/lineage")["data"]
    assert len(whole) == 6
    for limit in (1, 2, 3, 4, 6):
        found: list[Any] = []
        cursor = ""
        while cursor is not None:
            page = admin(gateway, f"/admin/policies/2/lineage?limit={limit}{cursor and '&cursor=' + cursor}")
            assert len(page["data"]) <= limit
            found += page["data"]
            cursor = page["next_cursor"]
        assert found == whole, limit


def test_deleted_sessions_leave_the_lineage(gateway: RunningGateway, trainer: StreamReader) -> None:
    good, bad = group(gateway, "g", [1.0, 0.0])
    step(trainer, 1, {good: 0.5, bad: -0.5})
    published(gateway, 1)
    assert gateway.call("DELETE", f"/sessions/{good}").status_code == 200
    found = admin(gateway, "/admin/policies/1/lineage")
    assert [each["session_id"] for each in found["data"]] == [bad]
    assert [each["sessions"] for each in found["steps"]] == [2]
    members = {each["session_id"]: each for each in admin(gateway, "/admin/groups/g")["members"]}
    assert members[good] == {
        "session_id": good,
        "reward": None,
        "advantage": None,
        "verdict": "deleted",
        "step": None,
        "version": None,
    }


WRONG = [
    ("/policies/1/lineage?cursor=x", 400, "cursor"),
    ("/policies/1/lineage?cursor=WzFd", 400, "cursor"),
    ("/policies/1/lineage?limit=0", 400, "limit"),
    ("/policies/-1/lineage", 400, "version"),
    ("/policies/99999999999999999999/lineage", 400, "version"),
    ("/groups/nobody", 404, None),
]


def test_wrong_questions_are_refused(gateway: RunningGateway, trainer: StreamReader) -> None:
    published(gateway, 1)
    without_steps = {"version": 1, "steps": [], "data": [], "next_cursor": None}
    assert admin(gateway, "/admin/policies/1/lineage") == without_steps
    assert gateway.admin("GET", "/policies/6/lineage").status_code == 404
    for path, status, param in WRONG:
        reply = gateway.admin("GET", path)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), path
        assert gateway.get(f"/admin{path}", key=CLIENT_KEY).status_code == 403, path


def test_a_group_shows_how_its_rewards_became_advantages(
    gateway: RunningGateway, trainer: StreamReader
) -> None:
    gateway.session(group_id="h")
    open_ = admin(gateway, "/admin/groups/h")
    assert (open_["size"], open_["mean"], open_["std"]) == (None, None, None)
    assert [each["verdict"] for each in open_["members"]] == ["open"]
    names = group(gateway, "g", [1.0, 0.0, 0.5], turns=2)
    waiting = admin(gateway, "/admin/groups/g")
    assert {each["verdict"] for each in waiting["members"]} == {"ready"}
    assert {each["advantage"] for each in waiting["members"]} == {None}
    step(trainer, 4, dict(zip(names, [0.5, -0.5, 0.0], strict=True)))
    found = admin(gateway, "/admin/groups/g")
    members = {each.pop("session_id"): each for each in found.pop("members")}
    assert found == {
        "group_id": "g",
        "size": 3,
        "task_id": "sum",
        "mean": 0.5,
        "std": 0.5,
        "members_left_out": 0,
    }
    trained = {"verdict": "trained", "step": 4, "version": 4}
    assert [members[name] for name in names] == [
        {"reward": 1.0, "advantage": 0.5, **trained},
        {"reward": 0.0, "advantage": -0.5, **trained},
        {"reward": 0.5, "advantage": 0.0, **trained},
    ]
