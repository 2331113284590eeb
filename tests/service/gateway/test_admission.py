"""Limits: which calls and sessions are admitted, which must wait, and which are never refused."""

import gc
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, cast

import openai
import pytest
from redis.asyncio import Redis as AsyncRedis

from gateway.callers.admission import MOST_PAGES, PAGE, Admission, Quota, Quotas
from gateway.callers.api_keys import ApiKeys
from gateway.fleet.fleet import Fleet
from gateway.prometheus import Metrics
from gateway.settings import GatewaySettings, LimitSettings
from rollout_queue import clock
from rollout_queue.contract.records import SessionSpec
from rollout_queue.redis import key_names
from tests.support.gateway.polls import polled
from tests.support.gateway.running import CLIENT_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.redis_clients import async_redis_at
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

STEP_S = 20.0
"""How long a step of the trainer takes."""
RATES = ("requests_per_minute", "tokens_per_minute")


@pytest.fixture
def limited(gateway: RunningGateway, backends: Backends) -> Any:
    """Starts a gateway with the given limits, on the Redis that `gateway` uses."""
    return lambda **limits: backends.ready_gateway(limits=LimitSettings(**limits))


def refusal(reply: Any) -> tuple[str, int]:
    """Checks that a 429 has the contract's shape; returns its code and its Retry-After in seconds."""
    assert reply.status_code == 429, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "rate_limit_error"
    retry_s = int(reply.headers["retry-after"])
    assert retry_s >= 1
    assert f"try again in {retry_s} s" in error["message"]
    return error["code"], retry_s


def trainer_says(gateway: RunningGateway, **fields: float | str) -> None:
    """Write fields of the trainer's heartbeat to Redis."""
    usual = {"version": 0, "rollouts_waiting": 0, "rollouts_owed": 0, "rollouts_per_step": 4.0}
    said: Any = usual | {"last_seen": clock.now()} | fields
    gateway.redis.hset(key_names.TRAINER, mapping=said)
    polled()


# Rate and budget of a key


def test_without_limits_nothing_is_refused_and_nothing_counted(gateway: RunningGateway) -> None:
    settings = GatewaySettings.model_fields["limits"].default
    assert settings.model_dump(exclude={"burst_s", "queue_memory"}, exclude_none=True) == {}
    for _ in range(5):
        assert gateway.chat().status_code == 200
    assert gateway.redis.keys("weir:b:*") == []
    assert gateway.redis.keys("weir:open*") == []


def test_a_key_that_calls_too_often_waits_as_long_as_it_is_told(limited: Any, turned: TurnedClock) -> None:
    with limited(requests_per_minute=15, burst_s=4) as gateway:
        admitted, began = 0, time.monotonic()
        last = calls = began
        while (reply := gateway.chat()).status_code == 200:  # once, and on a busy machine again
            admitted, last, calls = admitted + 1, calls, time.monotonic()
        assert 1 <= admitted <= 1 + 15 * (time.monotonic() - began) / 60
        code, retry_s = refusal(reply)
        assert (code, "15 calls a minute" in reply.text) == ("rate_limited", True)
        assert 4 - (time.monotonic() - last) <= retry_s <= 4, "neither too early nor much too late"
        polled()
        gateway.redis.delete("none", *gateway.redis.keys("weir:b:*"))  # Redis' own clock is not turned
        turned.turn(retry_s)
        assert gateway.chat().status_code == 200
        assert gateway.refusals == {"rate_limited": 1.0}


def test_each_key_has_a_rate_of_its_own_and_its_sessions_share_it(limited: Any) -> None:
    with limited(requests_per_minute=2) as gateway:
        first, second = gateway.session(), gateway.session()
        for session in (first, second):
            assert gateway.chat(key=session["api_key"]).status_code == 200
        for key in (CLIENT_KEY, first["api_key"], second["api_key"]):
            assert refusal(gateway.chat("something else", key=key))[0] == "rate_limited"
        assert gateway.redis.zcard(key_names.SESSIONS) == len(gateway.engine.requests) == 2
        assert gateway.chat(key=OTHER_KEY).status_code == 200


def test_openais_client_survives_a_short_limit_without_noticing(limited: Any) -> None:
    with limited(requests_per_minute=60, burst_s=1) as gateway:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=CLIENT_KEY, max_retries=2)
        while gateway.refusals.get("rate_limited", 0) < 2:
            reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
            assert reply.choices[0].message.content == "hello"


@pytest.mark.parametrize("call", [{}, {"stream": True}, {"n": 3}], ids=repr)
def test_a_key_pays_for_the_tokens_of_its_calls(limited: Any, call: dict[str, Any]) -> None:
    """Choices of one call pay for its prompt once."""
    with limited(tokens_per_minute=60, burst_s=1) as gateway:
        began = time.monotonic()
        assert gateway.chat(**call).status_code == 200
        turns = gateway.turns(gateway.get("/sessions").json()["data"][0])
        spent = turns[0]["context_len"] + sum(turn["output_len"] for turn in turns)
        code, retry_s = refusal(gateway.chat())
        assert code == "token_budget"
        passed_s = time.monotonic() - began  # the budget grows by one token a second
        assert spent - passed_s - 1 <= retry_s <= spent + 1
        assert gateway.chat(key=OTHER_KEY).status_code == 200


def test_two_gateways_count_one_rate(limited: Any) -> None:
    limits = {"requests_per_minute": 1, "burst_s": 360}
    with limited(**limits) as left, limited(**limits) as right:
        assert [left.chat().status_code for _ in range(3)] == [200] * 3
        assert right.chat().status_code == 200
        polled()
        assert [right.chat().status_code for _ in range(2)] == [200] * 2
        assert refusal(right.chat())[0] == "rate_limited"
        polled()
        assert refusal(left.chat())[0] == "rate_limited"
    with limited(**limits) as later:
        later.chat()
        polled()
        assert refusal(later.chat())[0] == "rate_limited", "it knows what was used before it started"


# Open sessions


def test_the_open_sessions_of_a_key_are_limited(limited: Any) -> None:
    with limited(open_sessions_per_key=2) as gateway:
        first, _ = gateway.session(), gateway.session()
        assert refusal(gateway.post("/sessions"))[0] == "sessions_limit"
        assert gateway.post("/sessions", key=OTHER_KEY).status_code == 201
        assert gateway.chat(key=first["api_key"]).status_code == 200
        gateway.finish(first)  # its place is free at once
        assert gateway.post("/sessions").status_code == 201
        assert gateway.refusals == {"sessions_limit": 1.0}
        reply = gateway.post("/groups", {"size": 3})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "size"), "it would never fit"


def test_the_open_sessions_of_a_deployment_are_limited(limited: Any) -> None:
    with limited(open_sessions=3) as gateway:
        gateway.post("/groups", {"size": 2})
        assert refusal(gateway.post("/groups", {"size": 2}, key=OTHER_KEY))[0] == "sessions_limit"
        assert gateway.post("/sessions", key=OTHER_KEY).status_code == 201
        assert refusal(gateway.chat("a new session"))[0] == "sessions_limit"
        assert refusal(gateway.chat(headers={"x-session-id": "new"}))[0] == "sessions_limit"


def test_a_session_is_found_again_though_no_place_is_left_and_gives_its_own_back_when_it_expires(
    limited: Any, turned: TurnedClock
) -> None:
    with limited(open_sessions=1) as gateway:
        opened = gateway.session(session_id="mine", ttl_s=60)
        refusal(gateway.post("/sessions"))
        again = gateway.post("/sessions", {"session_id": "mine", "ttl_s": 60})
        assert (again.status_code, again.json()["api_key"]) == (200, opened["api_key"])
        assert gateway.chat(headers={"x-session-id": "mine"}).status_code == 200
        turned.turn(60)
        wait_until(lambda: gateway.post("/sessions").status_code == 201)


def test_gateways_that_open_sessions_at_once_keep_the_limit_together(limited: Any) -> None:
    with limited(open_sessions=5) as left, limited(open_sessions=5) as right, ThreadPoolExecutor(8) as many:
        replies = list(many.map(lambda i: (left, right)[i % 2].post("/sessions").status_code, range(16)))
        assert sorted(replies) == [201] * 5 + [429] * 11


@pytest.mark.usefixtures("gateway")
@pytest.mark.parametrize("ended", [0, 6_000, 11_990])
async def test_a_sweep_takes_little_of_redis_however_many_sessions_are_open(
    redis_url: str, turned: TurnedClock, monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    """A session that ended without its client frees a place after a few refused openings."""
    names, count, own = [f"s{number:05}" for number in range(12_000)], 12_000, async_redis_at(redis_url)
    async with own.pipeline(transaction=False) as opening:
        for number, name in enumerate(names):
            opening.zadd(key_names.OPEN, {name: clock.now()})
            opening.hset(key_names.session(name), "spec", "any")
            if number == ended:
                opening.hset(key_names.session(name), "verdict", "any")
        await opening.execute()
    quotas, quota = Quotas(own, 0.5), Quota(key_names.OPEN, count, "outcome")
    spec, tries = SessionSpec(session_id="new", created_at=clock.now()), 0
    sent, execute = Counter[str](), cast(Any, own).execute_command

    def counted(command: str, *more: Any, **named: Any) -> Any:
        sent[command] += 1
        return execute(command, *more, **named)

    monkeypatch.setattr(own, "execute_command", counted)
    while not (await quotas.take([spec], [quota], shut=False)).allowed:
        tries += 1
        assert 0 < sent.pop("EVALSHA") < count / PAGE
        turned.turn(0.5)
    assert tries <= count / (PAGE * MOST_PAGES)
    assert await own.zscore(key_names.OPEN, names[ended]) is None
    await own.delete(key_names.OPEN, *map(key_names.session, names))
    await own.aclose()


# Staleness


def test_sessions_for_training_wait_while_the_trainer_has_too_much_to_train(limited: Any) -> None:
    with limited(staleness_versions=1) as gateway:
        trainer_says(gateway, rollouts_per_step=2)
        opened = [gateway.session() for _ in range(4)]  # two for the next step, two for the step after it
        reply = gateway.post("/sessions")
        assert refusal(reply)[0] == "staleness_budget"
        assert "4 rollouts are ahead" in reply.json()["error"]["message"]
        assert refusal(gateway.post("/groups", {"size": 2}))[0] == "staleness_budget"
        assert refusal(gateway.chat("an inferred session"))[0] == "staleness_budget"
        assert gateway.post("/sessions", {"train": False}).status_code == 201
        assert gateway.chat(key=opened[0]["api_key"]).status_code == 200
        gateway.finish(opened[0], status="failed")
        polled()
        assert gateway.post("/sessions").status_code == 201


def test_a_finished_session_holds_its_place_until_the_trainer_is_done_with_it(limited: Any) -> None:
    with limited(staleness_versions=0) as gateway:
        trainer_says(gateway, rollouts_per_step=1)
        for code in ("trained", "zero_advantage", "stale"):
            session = gateway.session()
            gateway.finish(session, reward=1.0)
            polled()
            assert refusal(gateway.post("/sessions"))[0] == "staleness_budget", code
            gateway.redis.hset(key_names.session(session["session_id"]), "verdict", f'{{"code": "{code}"}}')
            polled()
        assert gateway.post("/sessions").status_code == 201


def test_what_does_not_count_against_the_staleness_budget(limited: Any) -> None:
    """Neither sessions that calls opened, nor rollouts that are trained and not yet durable."""
    with limited(staleness_versions=0) as gateway:
        assert [gateway.chat(f"call {index}").status_code for index in range(4)] == [200] * 4
        trainer_says(gateway, rollouts_per_step=1, rollouts_owed=1)
        assert [gateway.post("/sessions").status_code for _ in range(3)] == [201, 201, 429]
        gateway.redis.delete(key_names.TRAINER)
        polled()
        opened = [gateway.post("/sessions").status_code for _ in range(3)]
        assert opened == [201] * 3, "without a trainer, nobody is refused"


def test_engines_that_lag_behind_the_trainer_use_up_the_budget(limited: Any) -> None:
    """So does what the trainer holds, whichever client brought it."""
    with limited(staleness_versions=2) as gateway:
        gateway.redis.set(key_names.SERVING, 7)
        trainer_says(gateway, version=7, rollouts_waiting=11)
        assert gateway.post("/sessions").status_code == 201
        trainer_says(gateway, version=7, rollouts_waiting=12)
        assert refusal(gateway.post("/sessions"))[0] == "staleness_budget"
        trainer_says(gateway, version=9)
        assert gateway.post("/sessions").status_code == 201
        trainer_says(gateway, version=10)
        reply = gateway.post("/sessions")
        assert refusal(reply)[0] == "staleness_budget"
        assert "serve version 7 while the trainer is at 10" in reply.json()["error"]["message"]


def test_a_trainer_that_waits_for_rollouts_does_not_make_clients_wait_as_long(
    limited: Any, turned: TurnedClock
) -> None:
    with limited(staleness_versions=0) as gateway:
        gateway.redis.set(key_names.SERVING, 2)
        began = time.monotonic()
        trainer_says(gateway, version=1, rollouts_waiting=4, state="training")
        trainer_says(gateway, version=2, rollouts_waiting=4, state="waiting")
        busy_s = time.monotonic() - began  # at most so long was its step
        turned.turn(busy_s + 60)  # the trainer waits longer
        polled()
        code, retry_s = refusal(gateway.post("/sessions"))
        assert code == "staleness_budget"
        assert retry_s <= max(1, math.ceil(busy_s))


def test_a_wait_for_the_trainer_is_as_long_as_its_steps_take(limited: Any, turned: TurnedClock) -> None:
    began = time.monotonic()
    with limited(staleness_versions=0) as gateway:
        trainer_says(gateway, version=0)
        turned.turn(STEP_S)
        trainer_says(gateway, version=1, rollouts_waiting=12, rollouts_per_step=4)
        gateway.redis.set(key_names.SERVING, 1)
        polled()
        _, retry_s = refusal(gateway.post("/sessions"))
        step_s = STEP_S + time.monotonic() - began  # its greatest duration
        assert math.ceil(9 / 4 * STEP_S) <= retry_s <= math.ceil(9 / 4 * step_s)  # nine too many, four a step


# The queue


def test_new_sessions_wait_while_too_much_is_in_the_queue(limited: Any) -> None:
    """While the training is paused, the queue does not empty, and evaluations are admitted."""
    with limited(queue_entries=2) as gateway:
        session = gateway.session()
        for _ in range(2):
            assert gateway.chat(key=session["api_key"]).status_code == 200
        polled()
        assert refusal(gateway.post("/sessions", {"train": False}))[0] == "queue_full"
        assert refusal(gateway.chat("an inferred session"))[0] == "queue_full"
        assert gateway.chat(key=session["api_key"]).status_code == 200
        trainer_says(gateway, state="paused")
        assert refusal(gateway.post("/sessions"))[0] == "queue_full"
        evaluation = gateway.post("/sessions", {"train": False})
        assert evaluation.status_code == 201
        assert gateway.chat(key=evaluation.json()["api_key"]).status_code == 200
        trainer_says(gateway, state="paused", last_seen=time.time() - 61)  # it has died since
        assert refusal(gateway.post("/sessions", {"train": False}))[0] == "queue_full"
        gateway.redis.xtrim(key_names.STREAM, maxlen=0)
        polled()
        assert gateway.post("/sessions").status_code == 201


def test_a_paused_trainer_may_have_sessions_for_training_refused(limited: Any) -> None:
    with limited() as gateway:
        session = gateway.session()
        trainer_says(gateway, state="paused", refuses_training="true")
        assert refusal(gateway.post("/sessions"))[0] == "training_paused"
        assert refusal(gateway.chat("an inferred session"))[0] == "training_paused"
        assert gateway.post("/sessions", {"train": False}).status_code == 201
        assert gateway.chat(key=session["api_key"]).status_code == 200, "open sessions go on"
        trainer_says(gateway, state="waiting", refuses_training="false")
        assert gateway.post("/sessions").status_code == 201


def test_a_redis_that_is_nearly_full_keeps_its_room_for_open_sessions(gateway: RunningGateway) -> None:
    session = gateway.session()
    # So large that the memory of connections does not matter.
    gateway.redis.setrange("ballast", 40 * 2**20 - 1, b"\0")

    replies: list[Any] = []

    def refused() -> bool:
        """Try to open a session while Redis is 95 % full. Each try sets it anew, because memory varies."""
        used: Any = gateway.redis.info("memory")
        gateway.redis.config_set("maxmemory", int(used["used_memory"] / 0.95))
        polled()
        replies.append(gateway.post("/sessions"))
        return bool(replies[-1].status_code == 429)

    try:
        wait_until(refused)
        reply = replies[-1]
        assert refusal(reply)[0] == "queue_full"
        assert "queue_memory" in reply.json()["error"]["message"]
        assert gateway.chat(key=session["api_key"]).status_code == 200
    finally:
        gateway.redis.config_set("maxmemory", 0)
        gateway.redis.delete("ballast")
    polled()
    assert gateway.post("/sessions").status_code == 201


@pytest.mark.parametrize("limits", [{}, dict.fromkeys(RATES, 10**9)])
def test_a_check_costs_the_same_however_many_keys_there_are(limits: dict[str, int]) -> None:
    limit = LimitSettings(**limits)
    admission = Admission(limit, ApiKeys(()), AsyncRedis(), cast(Fleet, None), Metrics(), poll_every_s=1)

    def check(owner: str) -> None:
        admission.check_call(owner)
        admission.spend(owner, 64)

    first = functions_called(lambda: check("owner 0"))
    for number in range(1000):
        check(f"owner {number}")
    assert functions_called(lambda: check("one more")) == first
    if not limits:
        assert first == 4, "only check, check_call and both methods named spend are called"


def functions_called(work: Callable[[], None]) -> int:
    """How many Python functions `work` calls: a measure of cost that no other process changes."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    gc.disable()  # a collection would call the finalizers of what earlier tests left
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(called) - 1  # without `work`


@pytest.mark.parametrize("stream", [False, True])
def test_replies_say_when_a_conversation_is_near_the_trainers_bound(
    gateway: RunningGateway, stream: bool
) -> None:
    header, usage = "x-weir-row-tokens", gateway.chat().json()["usage"]
    prompt, whole = usage["prompt_tokens"], usage["total_tokens"]
    trainer_says(gateway, max_row_tokens=prompt * 5 // 4)
    reply = gateway.chat(stream=stream)
    tokens, of, most = reply.headers[header].split()
    assert (of, int(most)) == ("of", prompt * 5 // 4)
    assert int(tokens) in (range(prompt, whole + 1) if stream else [whole])
    session = gateway.session(train=False)
    assert header not in gateway.chat(session=session, stream=stream).headers
    trainer_says(gateway, max_row_tokens=2 * whole)
    assert header not in gateway.chat(stream=stream).headers
