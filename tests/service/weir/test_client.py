"""The client library against a real gateway: blocks, rewards, groups, what failures mean, what a run says."""

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import weir
from tests.support.clients.proxies import Proxy
from tests.support.gateway.running import CLIENT_KEY, RunningGateway
from tests.support.serving import free_port, serving
from tests.support.turned_clock import TurnedClock
from weir.client import AgentSession, GatewayAddress, GatewayFault, RunStopped, SessionRefused, find_gateway
from weir.stack.run_keys import directory_of
from weir.stack.stack_state import ProcessState, StackState

QUESTION: Any = {"role": "user", "content": "value of c?"}


@pytest.fixture
def address(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> GatewayAddress:
    """The gateway, which the variables name."""
    monkeypatch.setenv("WEIR_GATEWAY_URL", gateway.url)
    monkeypatch.setenv("WEIR_CLIENT_KEYS", f"{CLIENT_KEY},other-key")
    return find_gateway()


def told(gateway: RunningGateway, session: AgentSession) -> dict[str, Any]:
    """The session as the gateway has it."""
    found: dict[str, Any] = gateway.get(f"/sessions/{session.session_id}").json()
    return found


def code_of(session: AgentSession) -> str | None:
    return session.verdict["code"] if session.verdict else None


def listed(gateway: RunningGateway) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.get("/sessions?limit=1000").json()["data"]
    return found


def answer(session: AgentSession, *messages: Any) -> str:
    client = session.openai()
    reply = client.chat.completions.create(model="policy", messages=[QUESTION, *messages])
    return reply.choices[0].message.content or ""


async def async_answer(session: AgentSession) -> str:
    reply = await session.async_openai().chat.completions.create(model="policy", messages=[QUESTION])
    return reply.choices[0].message.content or ""


# Blocks


def test_a_block_opens_rewards_and_completes_a_session(
    gateway: RunningGateway, address: GatewayAddress
) -> None:
    with weir.session(task_id="a task", metadata={"a": 1}) as s:
        reply = s.openai().chat.completions.create(model="policy", messages=[QUESTION])
        assert s.reward(0.25, turn_id=reply.id) == 0.25
        assert s.reward(0.5) == 0.75
        assert s.verdict is None
    assert s.total == 0.75
    assert code_of(s) == "ready"
    view = told(gateway, s)
    assert (view["status"], view["reward"], view["metadata"]) == ("completed", 0.75, {"a": 1})
    assert view["task_id"].startswith("a-task-"), "an id that the gateway accepts"
    assert view["turns"][0]["reward"] == 0.25


async def test_a_block_of_coroutines_does_the_same(gateway: RunningGateway, address: GatewayAddress) -> None:
    async with weir.session("greeting", train=False) as s:
        assert await async_answer(s) == "hello"
        assert await s.areward(1.0) == 1.0
        with pytest.raises(RuntimeError, match=r"await s\.areward"):
            s.reward(1.0)
    view = told(gateway, s)
    assert (view["status"], view["reward"], view["verdict"]["code"]) == ("completed", 1.0, "not_for_training")


def test_a_client_for_coroutines_may_be_used_in_a_loop_that_ends_before_the_block(
    address: GatewayAddress,
) -> None:
    with weir.session() as s:
        assert asyncio.run(async_answer(s)) == "hello"


def test_a_session_without_a_reward_waits_for_one(gateway: RunningGateway, address: GatewayAddress) -> None:
    with weir.session() as s:
        answer(s)
    assert told(gateway, s)["state"] == "waiting_reward"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("no such tool"), "failed", "ValueError: no such tool"),
        (KeyboardInterrupt(), "abandoned", "the program was stopped"),
        (SystemExit(1), "abandoned", "the program was stopped"),
    ],
)
def test_an_error_ends_the_session_by_what_it_means(
    gateway: RunningGateway, address: GatewayAddress, error: BaseException, status: str, reason: str
) -> None:
    with pytest.raises(type(error)), weir.session() as s:  # noqa: PT012 - the block is what is tested
        answer(s)
        raise error
    view = told(gateway, s)
    assert (view["status"], view["verdict"]["code"]) == (status, status)
    assert reason in view["verdict"]["detail"]


def test_a_full_context_truncates_the_session(gateway: RunningGateway, address: GatewayAddress) -> None:
    long: Any = {"role": "user", "content": "word " * 50_000}
    with pytest.raises(Exception, match="context") as caught, weir.session() as s:
        answer(s, long)
    assert told(gateway, s)["status"] == "truncated"
    assert type(caught.value).__name__ == "BadRequestError"


async def test_a_cancelled_block_abandons_its_session(
    gateway: RunningGateway, address: GatewayAddress
) -> None:
    opened = asyncio.Event()

    async def work() -> None:
        async with weir.session():
            opened.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await opened.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (row,) = listed(gateway)
    assert row["verdict"]["code"] == "abandoned"


async def test_a_session_whose_opening_is_cancelled_is_abandoned(
    gateway: RunningGateway, address: GatewayAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, goes_on = asyncio.Event(), asyncio.Event()
    ask = weir.client.agent_sessions.GatewayRequests.ask

    async def slow(client: Any, method: str, path: str, body: Any = None) -> Any:
        reply = await ask(client, method, path, body)
        if path == "/sessions":
            asked.set()
            await goes_on.wait()
        return reply

    monkeypatch.setattr(weir.client.agent_sessions.GatewayRequests, "ask", slow)
    task = asyncio.create_task(weir.session().__aenter__())
    await asked.wait()
    task.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [row["verdict"]["code"] for row in listed(gateway)] == ["abandoned"]


def test_who_ends_the_session_in_the_block_decides(gateway: RunningGateway, address: GatewayAddress) -> None:
    with weir.session() as s:
        answer(s)
        verdict = s.finish("truncated", 0.5, "ten steps")
    assert s.verdict == verdict
    assert (told(gateway, s)["status"], told(gateway, s)["reward"]) == ("truncated", 0.5)


def test_a_session_that_the_gateway_has_ended_is_an_error_that_names_it(
    gateway: RunningGateway, address: GatewayAddress
) -> None:
    with pytest.raises(SessionRefused, match="410"), weir.session() as s:
        gateway.call("DELETE", f"/sessions/{s.session_id}")
    with pytest.raises(ValueError, match="mine") as caught, weir.session() as s:  # noqa: PT012
        gateway.call("DELETE", f"/sessions/{s.session_id}")
        raise ValueError("mine")
    assert "a session was not ended" in caught.value.__notes__[0]


def test_a_group_is_opened_at_once_and_ended_together(
    gateway: RunningGateway, address: GatewayAddress
) -> None:
    with weir.group("sums", n=3) as members:
        for number, s in enumerate(members[:2]):
            answer(s)
            s.reward(float(number))
    assert {s.group_id for s in members} == {members[0].group_id}
    views = [told(gateway, s) for s in members]
    assert [(view["status"], view["reward"]) for view in views] == [
        ("completed", 0.0),
        ("completed", 1.0),
        ("completed", None),
    ]
    with weir.session(group=views[0]["group_id"] + "-other", group_size=2) as s:
        pass
    assert s.group_id == views[0]["group_id"] + "-other"


# Rollouts


def returning(given: Any) -> Callable[[AgentSession, str], Any]:
    def play(s: AgentSession, task: str) -> Any:
        return given

    return play


def test_a_rollout_plays_an_episode_with_the_reward_that_the_function_returns(
    gateway: RunningGateway, address: GatewayAddress
) -> None:
    @weir.rollout
    def play(s: AgentSession, task: dict[str, str]) -> float:
        """Plays."""
        return float(answer(s) == task["answer"])

    assert play({"id": "t1", "answer": "hello"}) == 1.0
    assert play.__doc__ == "Plays."
    (row,) = listed(gateway)
    assert (row["task_id"], row["status"], row["reward"]) == ("t1", "completed", 1.0)


async def test_a_rollout_of_a_coroutine_is_one(gateway: RunningGateway, address: GatewayAddress) -> None:
    @weir.rollout
    async def play(s: AgentSession, task: str) -> None:
        await s.areward(float(await async_answer(s) == "hello"))

    await asyncio.gather(play("t1"), play("t2"))
    assert {(row["task_id"], row["reward"]) for row in listed(gateway)} == {("t1", 1.0), ("t2", 1.0)}


@pytest.mark.parametrize(
    ("given", "status"), [(None, "failed"), (float("nan"), "failed"), (True, "completed"), (0, "completed")]
)
def test_what_a_function_returns_decides_how_its_episode_ends(
    gateway: RunningGateway, address: GatewayAddress, given: Any, status: str
) -> None:
    play = weir.rollout(returning(given))
    if status == "failed":
        with pytest.raises(ValueError, match="reward"):
            play("t")
    else:
        play("t")
    (row,) = listed(gateway)
    assert row["status"] == status
    assert row["reward"] == (None if status == "failed" else float(given))


def test_an_episode_that_others_grade_waits_for_its_reward(
    gateway: RunningGateway, address: GatewayAddress
) -> None:
    play = weir.rollout(returning(None), graded_elsewhere=True)
    play("t")
    (row,) = listed(gateway)
    assert row["state"] == "waiting_reward"


# Runs


@pytest.mark.parametrize("kind", ["function", "rollout", "coroutine"])
def test_training_plays_groups_of_each_task(
    gateway: RunningGateway, address: GatewayAddress, kind: str
) -> None:
    gateway.engine.mind = "7"

    def play(s: AgentSession, task: str) -> float:
        return float(answer(s) == task)

    async def play_async(s: AgentSession, task: str) -> float:
        return float(await async_answer(s) == task)

    agents: dict[str, Any] = {"function": play, "rollout": weir.rollout(play), "coroutine": play_async}
    run = weir.train(agents[kind], ["7", "8"], groups=3, n=2, concurrency=3)
    tasks = [task for task, _ in run.groups]
    assert sorted(set(tasks)) == ["7", "8"]
    assert len(tasks) == 3
    assert all(rewards == [float(task == "7")] * 2 for task, rewards in run.groups)
    rows = listed(gateway)
    assert len(rows) == 6
    assert {row["status"] for row in rows} == {"completed"}
    assert len({row["group_id"] for row in rows}) == 3
    assert "3 groups, 0 with different rewards, version 0 → 0, reward" in str(run)


def test_a_run_says_how_many_groups_can_teach(gateway: RunningGateway, address: GatewayAddress) -> None:
    rewards = iter([0.0, 1.0, 1.0, 1.0])
    run = weir.train(lambda s, task: next(rewards) if answer(s) else 0.0, ["a"], groups=2, n=2)
    assert str(run).startswith("2 groups, 1 with different rewards, version 0 → 0")
    assert "different" not in str(weir.evaluate(lambda s, task: 1.0, ["a", "b"]))


def test_no_more_episodes_run_at_once_than_wanted(gateway: RunningGateway, address: GatewayAddress) -> None:
    here, most, lock = 0, 0, threading.Lock()

    def play(s: AgentSession, task: str) -> float:
        nonlocal here, most
        with lock:
            here += 1
            most = max(most, here)
        answer(s)
        with lock:
            here -= 1
        return 1.0

    weir.train(play, ["a"], groups=4, n=3, concurrency=2)
    assert most == 2
    assert len(listed(gateway)) == 12


def test_an_evaluation_has_an_interval_and_trains_nothing(
    gateway: RunningGateway, address: GatewayAddress
) -> None:
    run = weir.evaluate(lambda s, task: task + len(answer(s)), [1.0, 2.0, 6.0], n=2)
    mean, low, high = run.interval()
    assert mean == pytest.approx(8.0)
    assert low < 7.0 < 9.0 < high
    assert {row["verdict"]["code"] for row in listed(gateway)} == {"not_for_training"}


def test_an_episode_that_fails_costs_no_other_one(gateway: RunningGateway, address: GatewayAddress) -> None:
    def play(s: AgentSession, task: int) -> float:
        if task == 1:
            raise LookupError("a broken tool")
        return 1.0

    run = weir.train(play, [0, 1], groups=2, n=2)
    assert (run.failed, run.means) == (2, [1.0])
    assert "2 episodes failed" in str(run)
    failed = [row for row in listed(gateway) if row["status"] == "failed"]
    assert [row["verdict"]["detail"] for row in failed] == ["LookupError: a broken tool"] * 2


@pytest.mark.parametrize("groups", [2, 100])
def test_a_function_that_always_fails_ends_the_run_with_its_error(
    gateway: RunningGateway, address: GatewayAddress, groups: int
) -> None:
    def play(s: AgentSession, task: str) -> float:
        raise LookupError("a broken tool")

    with pytest.raises(RunStopped, match="a broken tool") as caught:
        weir.train(play, ["a"], groups=groups, n=2, concurrency=2)
    assert isinstance(caught.value.__cause__, LookupError)
    rows = listed(gateway)
    assert len(rows) <= 2 * (5 + 3)
    assert {row["status"] for row in rows} <= {"failed", "abandoned"}


def endless() -> tuple[asyncio.Event, Callable[[AgentSession, str], Awaitable[float]]]:
    """An event that is set when an episode begins, and a function whose episodes do not end."""
    begun = asyncio.Event()

    async def play(s: AgentSession, task: str) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    return begun, play


async def test_an_episode_that_takes_too_long_is_truncated(
    gateway: RunningGateway, address: GatewayAddress, turned: TurnedClock
) -> None:
    begun, play = endless()
    run = asyncio.create_task(weir.client.train_async(play, ["a"], groups=1, n=1, episode_s=50))
    await begun.wait()
    turned.turn(51)
    assert (await run).means == []
    (row,) = listed(gateway)
    assert (row["status"], row["reward"]) == ("truncated", None)


async def test_a_run_that_is_cancelled_abandons_what_it_plays(
    gateway: RunningGateway, address: GatewayAddress
) -> None:
    begun, play = endless()
    run = asyncio.create_task(weir.client.train_async(play, ["a"], groups=3, n=2, concurrency=3))
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    rows = listed(gateway)
    assert rows
    assert {row["status"] for row in rows} == {"abandoned"}


def test_a_terminal_shows_the_progress_and_a_curve(
    address: GatewayAddress, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = iter([0.0, 1.0])

    def play(s: AgentSession, task: str) -> float:
        return next(rewards)

    weir.evaluate(lambda s, task: 1.0, ["a"])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    weir.train(play, ["a"], groups=2, n=1, concurrency=1)
    shown = capsys.readouterr().err.split("\r\x1b[2K")
    assert ["groups, version 0 → 0, reward " in line for line in shown[1:]] == [True] * 3
    assert shown[-1].startswith("2 groups, version 0 → 0, reward 0.500 → 0.500")
    drawn = [line.replace(" ", "") for line in shown[-1].splitlines()[1:]]  # either group may end first
    assert drawn == ["1.000│█", *["│█"] * 4, "0.000│█"]


# Where the gateway is


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory, and no variable that names a gateway."""
    monkeypatch.chdir(tmp_path)
    for name in ("GATEWAY_URL", "CLIENT_KEYS", "CLIENT_KEYS_FILE", "STACK__RUN_DIR"):
        monkeypatch.delenv(f"WEIR_{name}", raising=False)
    return tmp_path


def started(run_dir: Path, url: str) -> None:
    """What `weir up` leaves in its run directory."""
    StackState(
        parent=ProcessState(pid=1, started_at=0.0),
        services={"gateway": ProcessState(pid=1, started_at=0.0, url=url)},
    ).write(run_dir)
    directory_of(run_dir).mkdir()
    (directory_of(run_dir) / "client_keys").write_text("of-the-run\nanother\n")


def test_the_gateway_is_found_as_the_other_commands_find_it(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GatewayFault, match="start one with `weir up`"):
        find_gateway()
    Path("run").mkdir()
    started(Path("run"), "http://127.0.0.1:8000")
    assert find_gateway() == GatewayAddress("http://127.0.0.1:8000", "of-the-run")
    assert find_gateway("http://localhost:8000/").key == "of-the-run"
    assert find_gateway("http://elsewhere:8000").key is None
    assert "of-the-run" not in repr(find_gateway())
    monkeypatch.setenv("WEIR_GATEWAY_URL", "http://elsewhere")
    assert find_gateway() == GatewayAddress("http://elsewhere", None)
    Path("keys").write_text("from-a-file\n")
    monkeypatch.setenv("WEIR_CLIENT_KEYS_FILE", "keys")
    assert find_gateway() == GatewayAddress("http://elsewhere", "from-a-file")
    monkeypatch.setenv("WEIR_CLIENT_KEYS", "one,two")
    assert find_gateway("https://other/").key == "one"
    with pytest.raises(GatewayFault, match="give http://HOST:PORT"):
        find_gateway("elsewhere:8000")


async def test_a_gateway_that_is_not_there_is_one_sentence(nowhere: Path, turned: TurnedClock) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    opening = asyncio.ensure_future(weir.session(gateway=url).__aenter__())
    began = turned.monotonic()
    await asyncio.to_thread(turned.turn_until, opening.done, 1)
    assert turned.monotonic() - began < 250, "much less than a gateway is waited for that was there"
    with pytest.raises(GatewayFault) as caught:
        await opening
    assert str(caught.value) == f"{url} does not answer POST /sessions: is a gateway there?"


def test_a_wrong_key_is_the_gateways_sentence(gateway: RunningGateway) -> None:
    address = GatewayAddress(gateway.url, "wrong")
    with pytest.raises(GatewayFault, match="401"), weir.session(gateway=address):
        pass


def test_a_library_that_is_not_installed_is_named(
    address: GatewayAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with weir.session() as s, pytest.raises(ImportError, match="`pip install anthropic`"):
        s.anthropic()


# Requests that are made again


@dataclass
class HesitatingProxy(Proxy):
    """Loses the first answers to each path, after they took effect, and then refuses some for load."""

    hesitates: int = 3
    seen: defaultdict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    """The bodies of requests by path."""

    async def answers_once(self, url: str) -> None:
        """The first answer of an address is waited for some seconds only, which a turned clock lets pass."""
        client = weir.client.agent_sessions.GatewayRequests(GatewayAddress(url))
        with pytest.raises(SessionRefused, match="404"):
            await client.ask("GET", "/nothing")
        await client.close()
        self.seen.clear()

    async def forward(self, request: Request) -> Response:
        if request.url.path == "/nothing":
            return Response(status_code=404)
        bodies = self.seen[request.url.path.split("/")[-1]]
        bodies.append(await request.body())
        if len(bodies) > self.hesitates:
            return await super().forward(request)
        if len(bodies) == 1:
            await self.send(request)
            return Response(status_code=502)
        return Response(status_code=503, headers={"retry-after": "20"})


async def test_requests_are_made_again_and_have_their_effect_once(
    gateway: RunningGateway, address: GatewayAddress, turned: TurnedClock
) -> None:
    async def play(url: str) -> list[AgentSession]:
        address = GatewayAddress(url, CLIENT_KEY, wait_s=1e6)
        async with weir.group("t", n=2, gateway=address) as members:
            for s in members:
                await s.areward(0.5)
        return members

    proxy = HesitatingProxy(gateway.url)
    with serving(proxy.app()) as url:
        await proxy.answers_once(url)
        playing = asyncio.ensure_future(play(url))
        await asyncio.to_thread(turned.turn_until, playing.done, 5)
        members = await playing
    assert [len(proxy.seen[path]) for path in ("groups", "reward", "finish")] == [4, 5, 5]
    assert all(len(set(bodies[:4])) == 1 for bodies in proxy.seen.values()), "with the same ids"
    assert len(listed(gateway)) == 2
    assert [told(gateway, s)["reward"] for s in members] == [0.5, 0.5]


async def test_a_request_is_not_made_again_for_ever(
    gateway: RunningGateway, address: GatewayAddress, turned: TurnedClock
) -> None:
    proxy = HesitatingProxy(gateway.url, hesitates=1_000_000)
    with serving(proxy.app()) as url:
        await proxy.answers_once(url)
        given = GatewayAddress(url, CLIENT_KEY, wait_s=100)
        opening = asyncio.ensure_future(weir.session(gateway=given).__aenter__())
        await asyncio.to_thread(turned.turn_until, opening.done, 5)
        with pytest.raises(GatewayFault, match="503"):
            await opening
    assert len(proxy.seen["sessions"]) <= 7


def test_the_official_client_makes_calls_again(gateway: RunningGateway, address: GatewayAddress) -> None:
    refusal = JSONResponse({"error": {"message": "busy"}}, 503, {"retry-after": "0"})
    gateway.engine.refusals.extend([refusal] * 4)
    with weir.session() as s:
        assert s.openai().max_retries == 8
        assert s.openai(max_retries=0).max_retries == 0
        assert answer(s) == "hello"


def test_a_training_without_tasks_says_so() -> None:
    with pytest.raises(ValueError, match="there are no tasks to train on"):
        weir.train(lambda s, task: 1.0, [], groups=1)
