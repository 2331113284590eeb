"""A client finds its own sessions again, page by page."""

from typing import Any

import pytest

from rollout_queue.redis import keys
from tests.support.gateway.running import OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import scripted_trainer
from tests.support.gateway.tinker_loop import TinkerLoop


def began(loop: TinkerLoop, **given: Any) -> str:
    body = {"tags": [], "sdk_version": "0.38.0", "type": "create_session", **given}
    session_id: str = loop.post("create_session", body).json()["session_id"]
    return session_id


def finished(loop: TinkerLoop, session_id: str, how: str) -> None:
    body = {"reason": {"type": how}, "detail": "told"}
    assert loop.post(f"sessions/{session_id}/finish", body).status_code == 200


def search(loop: TinkerLoop, **asked: Any) -> Any:
    """As the SDK asks."""
    body = {"user_metadata": {}, "owner": {"type": "own"}, "limit": 50} | asked
    reply = loop.post("sessions/search", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def found(loop: TinkerLoop, **asked: Any) -> list[str]:
    return [each["session_id"] for each in search(loop, **asked)["sessions"]]


@pytest.fixture
def loop(gateway: RunningGateway, backends: Backends) -> TinkerLoop:
    return TinkerLoop(gateway, str(backends.model_path))


def test_sessions_are_found_by_their_names_metadata_and_ids(loop: TinkerLoop) -> None:
    nightly = began(loop, display_name="Nightly run of MATH", user_metadata={"team": "a", "size": "8"})
    daily = began(loop, display_name="daily", user_metadata={"team": "a", "rank": 8})
    plain = began(loop)
    assert found(loop) == [plain, daily, nightly], "the newest first"
    assert found(loop, display_name="math nightly") == [nightly]
    assert found(loop, display_name="night day") == []
    assert found(loop, user_metadata={"team": "a"}) == [daily, nightly]
    assert found(loop, user_metadata={"team": "a", "size": "8"}) == [nightly]
    assert found(loop, user_metadata={"rank": "8"}) == [daily], "a value that is no text is found as JSON"
    assert found(loop, session_id=plain) == [plain]
    assert found(loop, session_id=plain, display_name="DAILY") == [plain, daily], "either one"
    assert found(loop, session_id=plain, user_metadata={"team": "a"}) == []
    assert found(loop, session_id="run-unknown") == []
    assert found(loop, owner={"type": "accessible"}) == [plain, daily, nightly]


def test_sessions_are_found_by_how_they_are(loop: TinkerLoop) -> None:
    runs, well, broken, silent = (began(loop) for _ in range(4))
    finished(loop, well, "success")
    finished(loop, broken, "errored")
    loop.gateway.redis.zadd(keys.CLIENT_SESSIONS_ENDED, {silent: 1.0})
    by = {each["session_id"]: each["status"] for each in search(loop)["sessions"]}
    assert (by[runs], by[silent]) == ({"type": "active"}, None)
    assert by[well] == {"type": "client_finished", "reason": {"type": "success"}, "detail": "told"}
    assert found(loop, statuses=[{"type": "active"}]) == [runs]
    assert found(loop, statuses=[{"type": "client_finished"}]) == [broken, well]
    errored = {"type": "client_finished", "reasons": ["errored"]}
    assert found(loop, statuses=[{"type": "active"}, errored]) == [broken, runs]
    assert found(loop, statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []


def test_pages_follow_one_another(loop: TinkerLoop) -> None:
    made = [began(loop, display_name=f"run {at % 2}") for at in range(7)][::-1]
    seen, asked = [], {"limit": 3}
    for _ in range(3):
        page = search(loop, **asked)
        seen += [each["session_id"] for each in page["sessions"]]
        began(loop)  # a newer one moves nothing
        asked = {"limit": 3, "cursor": page["next_cursor"]}
    assert (seen, page["next_cursor"]) == (made, None)
    first = search(loop, limit=2, display_name="0")
    rest = search(loop, limit=50, display_name="0", cursor=first["next_cursor"])
    assert [each["session_id"] for each in first["sessions"] + rest["sessions"]] == made[::2]
    gone = {"last_created_at": first["next_cursor"]["last_created_at"], "last_session_id": "run-forgotten"}
    after = search(loop, limit=50, display_name="0", cursor=gone)
    assert after["sessions"] == rest["sessions"], "also when the last one's record is removed"


def test_a_session_tells_what_it_holds(loop: TinkerLoop) -> None:
    with scripted_trainer(loop.gateway.redis):
        loop.begin()
        for number, verb in enumerate(("save_weights", "save_weights_for_sampler"), 1):
            loop.poll(loop.command(verb, number, path="x").json())
    (session,) = search(loop, session_id=loop.session_id)["sessions"]
    assert (session["checkpoints_count"], session["checkpoint_storage_bytes"]) == (2, 1234)
    assert (session["project_id"], session["user_metadata"]) == ("", None)
    assert isinstance(session["owner"], str)


def test_only_own_sessions_are_found(loop: TinkerLoop) -> None:
    session_id = began(loop, display_name="mine")
    other = TinkerLoop(loop.gateway, loop.base_model, f"tml-{OTHER_KEY}")
    theirs = began(other, display_name="mine")
    assert found(other, display_name="mine") == [theirs]
    assert found(other, owner={"type": "accessible"}) == [theirs]
    assert found(other, session_id=session_id) == []


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"project_ids": ["x"]}, "project_ids"),
        ({"owner": {"type": "user", "owner_urns": ["urn:x"]}}, "owner"),
        ({"owner": {"type": "all"}}, "owner"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "asleep"}]}, "statuses"),
        ({"display_name": ""}, "display_name"),
        ({"limit": 201}, "limit"),
        ({"limit": 0}, "limit"),
        ({"colour": "red"}, "colour"),
        ({"cursor": {"last_created_at": "yesterday", "last_session_id": "x"}}, "last_created_at"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}}, "last_created_at"),
    ],
)
def test_a_filter_that_is_not_served_is_named(loop: TinkerLoop, asked: Any, named: str) -> None:
    refused = loop.post("sessions/search", asked)
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]


def test_a_page_reads_so_many_models_and_names_the_next_one(
    loop: TinkerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.rest.tinker_api.management.session_search.MOST_MODELS", 1)
    sessions: list[str] = []
    for _ in range(3):
        loop.begin()
        sessions.insert(0, loop.session_id)
    pages: list[list[str]] = []
    asked: dict[str, Any] = {}
    while not pages or asked["cursor"] is not None:
        told = search(loop, **asked)
        pages.append([each["session_id"] for each in told["sessions"]])
        asked["cursor"] = told["next_cursor"]
    assert [each for page in pages for each in page] == sessions
    assert len(pages) == 3
