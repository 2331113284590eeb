"""What the gateway measures of calls: the figures are right, documented, and have few labels."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.site.reference import metrics_page
from gateway.generations.conversation import FIRST_PROMPTS
from tests.support.gateway.calls import Call
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.gated_engine import asked, let_on
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.waiting import wait_until

HI = [{"role": "user", "content": "hi"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 8}),
}
WHOLE = {"token_ids": ("/inference/v1/generate", {"token_ids": [5, 6, 7]})}
"""Dialects without streams."""
PARTS = {"read", "session", "render", "tokenize", "wait", "sample", "parse", "record"}
WITHOUT_SAMPLE = {"weir_engine_kv_usage", "weir_engine_limit"}
"""They have no sample while no engine says its usage, and no server has a limit."""
JOINED = "weir_joined_calls_total"
Figures = dict[tuple[str, ...], float]


@pytest.fixture
def fresh(backends: Backends) -> Any:
    """A gateway that has served nothing."""
    backends.clear(None)
    with backends.ready_gateway(heartbeat_s=0.05) as gateway:
        yield gateway


def figures(gateway: RunningGateway) -> Figures:
    """The value of every sample, by its name and the values of its labels."""
    families = text_string_to_metric_families(gateway.get("/metrics", key=None).text)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def streamed(gateway: RunningGateway, dialect: str) -> int:
    """Make a streamed call; return how many parts of its body arrived."""
    path, body = CALLS[dialect]
    headers = {"authorization": "Bearer client-key"}
    url = gateway.url + path
    with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=300) as reply:
        assert reply.status_code == 200, reply.read()
        return sum(1 for _ in reply.iter_raw())


def test_a_call_counts_in_its_dialect_and_in_no_other(fresh: RunningGateway) -> None:
    for number, (dialect, (path, body)) in enumerate({**CALLS, **WHOLE}.items()):
        before = figures(fresh)
        assert not any(before["weir_part_seconds_count", dialect, part] for part in PARTS), dialect
        assert fresh.post(path, body).status_code == 200
        if dialect in CALLS:
            streamed(fresh, dialect)
        wrong: dict[str, Any] = {"temperature": "hot"} if dialect in CALLS else {"model": 5}
        assert fresh.post(path, body | wrong).status_code == 400
        assert fresh.post(path, body, key="wrong").status_code == 401
        found = figures(fresh)
        counted = {
            key[1:]: value
            for key, value in found.items()
            if key[0] == "weir_http_responses_total" and key[1] == dialect
        }
        answers = 2 if dialect in CALLS else 1
        assert counted == {(dialect, "200"): answers, (dialect, "400"): 1, (dialect, "401"): 1}
        assert found["weir_engine_wait_seconds_count", dialect] == answers
        if dialect in CALLS:
            assert found["weir_first_token_seconds_count", dialect] == 1
            for part in PARTS - {"render", "tokenize"}:
                assert found["weir_part_seconds_count", dialect, part] >= 2, (dialect, part)
        assert found["weir_part_seconds_sum", dialect, "sample"] > 0
        served = {key[1] for key in found if key[0] == "weir_http_responses_total"} - {"rest"}
        assert len(served) == number + 1, "no other dialect counts"
    assert not any(found["weir_part_seconds_count", "count_tokens", part] for part in PARTS)


class Heard(FakeEngine):
    """Begins a token when the gateway has written the one before. The last two may be one event."""

    sent = 0
    written: Callable[[], float]

    async def _stall(self) -> None:
        self.sent += 1
        await asyncio.to_thread(wait_until, lambda: self.written() >= min(3, self.sent))


def test_every_event_but_the_first_has_a_gap_and_the_slowest_parts_are_named(
    fresh: RunningGateway, backends: Backends
) -> None:
    def written() -> float:
        found = figures(fresh)
        return sum(found[f"weir_{name}_seconds_count", "chat"] for name in ("first_token", "token_gap"))

    backends.engine = fresh.engine = engine = Heard(backends.tokenizer, stall_after=1)
    engine.written = written
    assert fresh.admin("GET", "/status").json()["slowest_parts"] == []
    fresh.engine.pace_s = 0.2  # longer than the heartbeats, which do not count
    fresh.engine.script.append([300, 301, 302])
    streamed(fresh, "chat")
    found = figures(fresh)
    gaps = found["weir_token_gap_seconds_count", "chat"]
    assert 2 <= gaps <= 3
    assert found["weir_token_gap_seconds_bucket", "chat", "0.1"] == 0
    assert found["weir_token_gap_seconds_sum", "chat"] >= 0.2 * gaps * 0.9
    assert found["weir_first_token_seconds_sum", "chat"] >= 0.2 * 0.9
    parts = fresh.admin("GET", "/status").json()["slowest_parts"]
    assert len(parts) == 5
    (sample,) = (part for part in parts if part["part"] == "sample")
    assert (sample["runs"], sample["seconds"] >= 0.2 * 0.9) == (1, True)
    assert [part["seconds"] for part in parts] == sorted((p["seconds"] for p in parts), reverse=True)
    assert {part["part"] for part in parts} <= PARTS


def test_the_caches_count_their_hits_and_a_prompts_time_is_divided(
    fresh: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FIRST_PROMPTS, "clear", lambda: None)  # another gateway's task of each minute

    def lookups(cache: str) -> list[float]:
        found = figures(fresh)
        return [found["weir_cache_lookups_total", cache, result] for result in ("hit", "miss")]

    before = {cache: lookups(cache) for cache in ("heads", "phrases", "first_prompts")}
    for _ in range(2):
        session = fresh.session()
        for _ in range(2):
            fresh.chat("a phrase that no other test uses", key=session["api_key"])
    after = {cache: lookups(cache) for cache in before}
    grown = {
        cache: [now - then for now, then in zip(after[cache], before[cache], strict=True)] for cache in before
    }
    assert grown["first_prompts"] == [1, 1], "both sessions begin with the same prompt"
    assert grown["heads"] == [2, 2], "a session is read at its first call"
    assert min(grown["phrases"]) > 0
    assert fresh.post("/v1/messages/count_tokens", {"messages": HI, "model": "policy"}).status_code == 200
    found = figures(fresh)
    for dialect in ("chat", "count_tokens"):
        for part in ("render", "tokenize"):
            assert found["weir_part_seconds_count", dialect, part] >= 1
            assert found["weir_part_seconds_sum", dialect, part] > 0
    wait_until(lambda: figures(fresh)["weir_loop_lag_seconds_count",] >= 2)


def test_a_call_is_in_flight_until_its_end_and_counts_as_499_if_its_client_leaves(
    gated: RunningGateway,
) -> None:
    left = ("weir_http_responses_total", "chat", "499")
    before = figures(gated).get(left, 0)
    staying, leaving = (Call(gated, gated.session()) for _ in range(2))
    asked(gated, 2)
    assert figures(gated)["weir_calls_in_flight", "chat"] == 2
    leaving.hang_up()
    wait_until(lambda: figures(gated).get(left, 0) == before + 1)
    let_on(gated)
    staying.completion()
    wait_until(lambda: figures(gated)["weir_calls_in_flight", "chat"] == 0)


def test_a_retry_counts_if_it_joins_a_call_in_flight_and_no_other_call_does(gated: RunningGateway) -> None:
    def joined() -> Figures:
        return {key[1:]: value for key, value in figures(gated).items() if key[0] == JOINED}

    session = gated.session()
    calls = [Call(gated, session), Call(gated, session)]  # the second is no retry, but a call of its own
    asked(gated, 2)
    before = joined()
    calls.append(Call(gated, session, attempt=1, temperature=0.5))  # repeats none of them
    asked(gated, 3)
    assert joined() == before
    calls += [Call(gated, session, attempt) for attempt in (1, 2)]
    more = {**before, ("chat",): before["chat",] + 2}
    wait_until(lambda: joined() == more)
    let_on(gated)
    for call in calls:
        call.completion()
    Call(gated, session, attempt=3).completion()  # nothing is in flight
    assert joined() == more


def test_a_call_that_no_engine_takes_has_waited(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(engines=[], engine_wait_s=0.3) as gateway:
        assert gateway.chat().status_code == 503
        found = figures(gateway)
    assert found["weir_engine_wait_seconds_count", "chat"] == 1
    assert found["weir_engine_wait_seconds_sum", "chat"] >= 0.3 * 0.9
    assert found["weir_part_seconds_count", "chat", "sample"] == 0


def test_the_page_of_metrics_has_every_metric_with_its_help_and_every_label(fresh: RunningGateway) -> None:
    fresh.chat()
    page = "\n".join(metrics_page()).partition("\n## gateway\n")[2].split("\n## ")[0]
    rows = re.findall(r"^\| `(weir_\w+)` \|([^|]*)\| \w", page, re.M)
    named = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    families = text_string_to_metric_families(fresh.get("/metrics", key=None).text)
    measured: dict[str, set[str]] = {}
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        measured[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    made_by_the_library = {name for name in measured if name.endswith("_created")}
    assert set(measured) - made_by_the_library | WITHOUT_SAMPLE == set(named)
    for name, labels in named.items():
        assert measured.get(name, set()) in (set(), labels), name


def test_clients_make_no_labels(fresh: RunningGateway) -> None:
    def call(numbers: range) -> set[tuple[str, ...]]:
        for number in numbers:
            fresh.get(f"/no/such/{number}")
            fresh.chat(model=f"model-{number}", user=f"user-{number}")
            fresh.chat(path=f"/sessions/s-{number}/v1/chat/completions")
            fresh.call(f"METHOD{number}", "/sessions")
        return set(figures(fresh))

    assert call(range(3)) == call(range(3, 20))
