"""The live stream: one picture for all viewers, none without a viewer, and an end for each stream."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from gateway.errors import LimitReached
from gateway.page.live import LiveFeed
from gateway.prometheus import Metrics
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.page.client import PageClient
from tests.support.waiting import wait_until

VIEWERS = 10
BEARER = {"authorization": f"Bearer {ADMIN_KEY}"}


def events(reply: httpx.Response) -> Iterator[tuple[str, Any]]:
    """The name and the data of each event."""
    name = ""
    for line in reply.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_a_picture_has_what_the_rest_answers(gateway: RunningGateway) -> None:
    report = TrainerReport(state="waiting", step=7, version=3, waiting_for="rollouts", last_seen=time.time())
    gateway.redis.hset(key_names.TRAINER, mapping=report.fields())  # type: ignore[arg-type]
    gateway.chat()
    with gateway.http.stream("GET", f"{gateway.url}/page/events", headers=BEARER) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-store"
        name, picture = next(events(reply))
    assert name == "picture"
    status = gateway.get("/admin/status", key=ADMIN_KEY).json()
    for part in ("policy", "trainer", "traffic"):
        assert picture["status"][part] == status[part]
    assert picture["status"]["traffic"]["turns"] >= 1
    assert {"states", "verdicts", "sentences", "groups"} < set(picture["pipeline"])


def test_nobody_looks_without_an_admin_key(gateway: RunningGateway, page: PageClient) -> None:
    assert gateway.get("/page/events", key=None).status_code == 401
    assert gateway.get("/page/events").status_code == 403


def test_signing_out_ends_the_stream(page: PageClient, gateway: RunningGateway) -> None:
    page.sign_in(ADMIN_KEY)
    with page.http.stream(
        "GET", f"{gateway.url}/page/events", headers={"sec-fetch-site": "same-origin"}
    ) as reply:
        told = events(reply)
        assert next(told)[0] == "picture"
        other = PageClient(httpx.Client(cookies=page.http.cookies, timeout=120), gateway.url, page.csrf)
        with other.http:
            assert other.send("DELETE", "/page/session").status_code == 200
        assert [name for name, _ in told][-1] == "end"


def test_revoking_the_key_ends_the_stream(gateway: RunningGateway) -> None:
    made = gateway.post("/admin/keys", {"name": "night", "role": "admin"}, key=ADMIN_KEY).json()
    headers = {"authorization": f"Bearer {made['api_key']}"}
    with gateway.http.stream("GET", f"{gateway.url}/page/events", headers=headers) as reply:
        told = events(reply)
        assert next(told)[0] == "picture"
        httpx.delete(f"{gateway.url}/admin/keys/night", headers=BEARER, timeout=120)
        assert [name for name, _ in told][-1] == "end"


def test_the_number_of_viewers_is_bounded(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(page={"viewers": 2, "every_s": 0.1}) as gateway:
        address = f"{gateway.url}/page/events"
        with (
            gateway.http.stream("GET", address, headers=BEARER) as one,
            gateway.http.stream("GET", address, headers=BEARER) as two,
        ):
            told = [events(one), events(two)]  # a stream closes when nobody holds its events any more
            assert [next(each)[0] for each in told] == ["picture", "picture"]
            refused = httpx.get(address, headers=BEARER, timeout=120)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "viewers_limit"
            assert refused.headers["retry-after"]
            assert gateway.refusals == {"viewers_limit": 1}

        def free() -> bool:
            with gateway.http.stream("GET", address, headers=BEARER) as reply:
                return reply.status_code == 200

        wait_until(free)


@pytest.fixture
def feed() -> tuple[LiveFeed, list[bytes]]:
    made: list[bytes] = []

    async def picture() -> bytes:
        made.append(b"event: picture\ndata: %d\n\n" % len(made))
        return made[-1]

    return LiveFeed(picture, 0.01, VIEWERS, Metrics()), made


async def yes() -> bool:
    return True


def admitted(live: LiveFeed) -> AsyncIterator[bytes]:
    live.admit()
    return live.events(yes)


def test_viewers_count_before_their_events_begin(feed: tuple[LiveFeed, list[bytes]]) -> None:
    """Of many that come at once, no more are admitted than may look."""
    live, _ = feed
    for _ in range(VIEWERS):
        live.admit()
    with pytest.raises(LimitReached):
        live.admit()
    live.leave()
    live.admit()


async def test_one_picture_is_made_for_all_viewers_and_none_without_one(
    feed: tuple[LiveFeed, list[bytes]],
) -> None:
    live, made = feed
    assert not made
    viewers = [admitted(live) for _ in range(5)]
    seen = [[await anext(each) for _ in range(2)][1] for each in viewers]
    assert set(seen) <= set(made)
    assert len(made) < 5
    for each in viewers:
        await each.aclose()  # type: ignore[attr-defined]
        live.leave()
    await live.aclose()
    count = len(made)
    assert [each async for each in live.events(yes)] == [b"retry: 2000\n\n", b"event: end\ndata: {}\n\n"]
    assert len(made) == count


async def test_a_viewer_that_comes_back_gets_a_new_picture(feed: tuple[LiveFeed, list[bytes]]) -> None:
    live, _ = feed
    for _ in range(2):
        viewer = admitted(live)
        assert await anext(viewer) == b"retry: 2000\n\n"
        picture = await anext(viewer)
        assert picture.startswith(b"event: picture")
        await viewer.aclose()  # type: ignore[attr-defined]
        live.leave()
    await live.aclose()
