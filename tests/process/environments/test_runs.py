"""Runs of small environments and loops against a real gateway: what its sessions say afterwards."""

import asyncio
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import httpx
import pytest
from openai import APIConnectionError, APIStatusError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

import environments.hosts
import environments.run
from environments.errors import GatewayFault, RunStopped, UnknownEnvironment
from environments.results import EpisodeEnded, each_entry
from environments.session_client import Patience, SessionClient
from environments.settings import RunSettings
from environments.start_run import play_run
from rollout_queue.protocol.trainer_messages import RecoveryReport, TrainerReport
from rollout_queue.redis import key_names
from tests.support.environments.running import TOYS, RunTest, running_gateway
from tests.support.images import image_of, opened
from tests.support.redis_clients import redis_at
from tests.support.serving import free_port, serving
from tests.support.tiny_vision_model import make_tiny_vision_model
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until, wait_until_async
from weir.__main__ import app


def doubled(prompt: str) -> str:
    """Doubles even numbers, and is wrong about odd ones."""
    number = int(re.findall(r"double of (\d)", prompt)[-1])
    return str(2 * number + number % 2)


async def test_a_group_is_one_task_with_its_rewards(running: RunTest) -> None:
    running.engine.answer = doubled
    summary = await running.play("Double", group_size=3, episodes=12, concurrency=4)
    assert summary["by_status"] == {"completed": 12}
    sessions = running.sessions()
    assert len(sessions) == 12
    assert all(each["state"] == "finished" or each["verdict"]["code"] for each in sessions)
    by_group: dict[str, set[str]] = {}
    for each in sessions:
        by_group.setdefault(each["group_id"], set()).add(each["task_id"])
        number = int(re.findall(r"double of (\d)", each["turns"][0]["context_text"])[0])
        assert each["reward"] == float(number % 2 == 0)
    assert len(by_group) == 4
    assert all(len(tasks) == 1 for tasks in by_group.values())
    assert summary["reward_start"] == summary["reward_end"] == fmean(each["reward"] for each in sessions)


async def test_rewards_of_steps_belong_to_their_turns(running: RunTest) -> None:
    running.engine.answer = lambda prompt: str(1 + prompt.count("go on"))
    await running.play("Count", group_size=2, episodes=2)
    for session in running.sessions():
        assert [turn["reward"] for turn in session["turns"]] == [0.1, 0.1, None]
        assert session["reward"] == pytest.approx(1.2)
        assert [turn["relation"] for turn in session["turns"]] == ["root", "extends", "extends"]


async def test_the_model_calls_tools_and_reads_its_mistakes(running: RunTest) -> None:
    calls = iter(
        ['{"name": "look", "arguments": {"kez": "a"}}', '{"name": "look", "arguments": {"key": "a"}}']
    )

    def answer(prompt: str) -> str:
        if found := re.findall(r"a=(\d+)", prompt):
            return f"it is {found[-1]}"
        return f"<tool_call>\n{next(calls)}\n</tool_call>"

    running.engine.answer = answer
    summary = await running.play("Lookup", group_size=1, episodes=1)
    assert summary["by_status"] == {"completed": 1}
    (session,) = running.sessions()
    assert session["reward"] == 1.0
    assert "missing a required argument: 'key'" in session["turns"][1]["context_text"]


async def test_a_call_of_a_tool_earns_a_reward_and_ends_the_episode(running: RunTest) -> None:
    def answer(prompt: str) -> str:
        item = "b" if "here" in prompt else "a"
        return f'<tool_call>\n{{"name": "fetch", "arguments": {{"item": "{item}"}}}}\n</tool_call>'

    running.engine.answer = answer
    summary = await running.play("Errand", group_size=1, episodes=1)
    assert summary["by_status"] == {"completed": 1}
    (session,) = running.sessions()
    assert [turn["reward"] for turn in session["turns"]] == [0.5, None]
    assert session["reward"] == 1.0
    ended = [*each_entry(running.run_dir)][-1]
    assert isinstance(ended, EpisodeEnded)
    assert ended.metrics == {"left": 0}


async def test_an_evaluation_is_never_trained_and_says_how_sure_it_is(running: RunTest) -> None:
    running.engine.answer = doubled
    summary = await running.play("Double", mode="eval", tasks=10, group_size=2)
    assert {each["verdict"]["code"] for each in running.sessions()} == {"not_for_training"}
    assert summary["reward"]["mean"] == 0.5
    assert summary["reward"]["low"] < 0.5 < summary["reward"]["high"]
    assert summary["pass_at_k"] == {"1": 0.5, "2": 0.5}
    assert summary["versions"] == {0: 20}
    assert [task["passed"] for task in summary["tasks"]] == [2, 0] * 5
    seeds = {request["sampling_params"].get("sampling_seed") for request in running.engine.requests}
    assert len(seeds) == 20, "each sample has a seed of its own"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "the sandbox is gone"),
        ("nan", "a reward must be finite"),
        ("null", "the environment gave no reward"),
        ("dies", "ended with -9"),
    ],
)
async def test_a_fault_of_the_environment_is_never_a_reward(running: RunTest, how: str, reason: str) -> None:
    summary = await running.play(
        "Faulty", options={"how": how}, group_size=2, mode="eval", tasks=2, concurrency=1
    )
    assert summary["by_status"] == {"failed": 2, "completed": 2}
    failed = running.sessions(verdict="failed")
    assert len(failed) == 2
    assert all(each["reward"] is None for each in failed)
    assert all(reason in each["verdict"]["detail"] for each in failed)


async def hung_for(seconds: float, turned: TurnedClock, running: RunTest, mark: Path, **given: Any) -> Any:
    """Play an environment that hangs, and let so much time pass."""
    options = {"how": "hangs", "mark": str(mark)}
    playing = asyncio.create_task(running.play("Faulty", options=options, **given))
    await wait_until_async(mark.exists)
    turned.turn(seconds)
    return await playing


async def test_a_hung_environment_is_killed_and_the_run_goes_on(
    turned: TurnedClock, running: RunTest, tmp_path: Path
) -> None:
    given = {"group_size": 1, "episodes": 2, "concurrency": 1, "step_s": 60.0}
    summary = await hung_for(60, turned, running, tmp_path / "it hangs", **given)
    assert summary["by_status"] == {"failed": 1, "completed": 1}
    (failed,) = running.sessions(verdict="failed")
    assert "did not answer 'step' within 60 s" in failed["verdict"]["detail"]


async def test_what_a_library_prints_is_no_answer(running: RunTest) -> None:
    summary = await running.play("Faulty", options={"how": "prints"}, group_size=1, episodes=1)
    assert summary["by_status"] == {"completed": 1}


async def test_options_do_not_stand_in_the_command_line_of_a_host(running: RunTest) -> None:
    await running.play("Visible", options={"key": "sk-secret"}, group_size=1, episodes=1)
    (session,) = running.sessions()
    made, _, visible = session["turns"][0]["context_text"].partition("command line")
    assert "made with sk-secret" in made
    assert "toys:Visible" in visible
    assert "sk-secret" not in visible


async def test_an_episode_without_end_is_truncated(running: RunTest) -> None:
    running.engine.answer = lambda prompt: "1"
    summary = await running.play("Count", group_size=1, episodes=1, max_turns=2)
    assert summary["by_status"] == {"truncated": 1}
    (session,) = running.sessions()
    assert session["status"] == "truncated"


@pytest.mark.parametrize(
    ("more", "status", "of_turns"),
    [({"max_turns": 1}, "truncated", [0.0]), ({"mode": "eval"}, "completed", [0.0, None])],
)
async def test_rewards_of_zero_alone_are_a_reward_of_zero(
    running: RunTest, more: dict[str, Any], status: str, of_turns: list[float | None]
) -> None:
    """The last step has no opinion. A group that waited for a reward could not be trained."""
    await running.play("Zeros", group_size=1, episodes=1, **more)
    (session,) = running.sessions()
    assert (session["status"], session["reward"]) == (status, 0.0)
    assert [turn["reward"] for turn in session["turns"]] == of_turns


async def test_a_run_that_is_stopped_does_not_wait_for_a_gateway_that_is_gone(
    running: RunTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise repeat the ends of its sessions for `wait_s`, here an hour."""
    calls = asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer(prompt: str) -> str:
        loop.call_soon_threadsafe(calls.set)
        return "go on"

    def nobody(*_: Any, **__: Any) -> Any:
        raise aiohttp.ClientConnectionError("nobody is there")

    running.engine.answer = answer
    monkeypatch.setattr(environments.run, "STOPS_WITHIN_S", 0.5)
    playing = asyncio.create_task(running.play("Count", group_size=2, concurrency=2, wait_s=3600.0))
    await calls.wait()
    monkeypatch.setattr(aiohttp.ClientSession, "request", nobody)
    playing.cancel()
    done, _ = await asyncio.wait([playing], timeout=300)
    assert done, "it would take an hour"


async def test_a_run_that_is_stopped_does_not_wait_for_sessions_that_the_gateway_does_not_open(
    running: RunTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, request = asyncio.Event(), aiohttp.ClientSession.request

    def refusing(client: Any, method: str, url: Any, **given: Any) -> Any:
        if (method.upper(), str(url).endswith("/sessions")) == ("POST", True):
            refused.set()
            raise aiohttp.ClientConnectionError("nobody is there")
        return request(client, method, url, **given)

    monkeypatch.setattr(environments.run, "STOPS_WITHIN_S", 0.5)
    monkeypatch.setattr(aiohttp.ClientSession, "request", refusing)
    playing = asyncio.create_task(running.play("Count", group_size=2, concurrency=2, wait_s=3600.0))
    await refused.wait()
    playing.cancel()
    done, _ = await asyncio.wait([playing], timeout=60)
    assert done, "it would take an hour"


async def test_a_player_that_there_is_not_fails_the_episode(running: RunTest) -> None:
    summary = await running.play("Crowded", group_size=1, episodes=1)
    assert summary["by_status"] == {"failed": 2}
    assert "names player 7, and has 2" in running.sessions()[0]["verdict"]["detail"]


async def test_a_host_that_dies_while_tasks_are_drawn_is_replaced(running: RunTest) -> None:
    summary = await running.play("DiesOnce", group_size=1, episodes=2, options={"mark": str(running.run_dir)})
    assert summary["by_status"] == {"completed": 2}


async def test_an_environment_without_tasks_stops_the_run_with_its_error(running: RunTest) -> None:
    with pytest.raises(RunStopped, match=r"gives no tasks: .*the list of tasks is gone"):
        await running.play("Taskless", group_size=1, episodes=1)


async def test_a_run_pauses_longer_after_each_group_that_failed(
    running: RunTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []

    def no_pause(failed: int) -> float:
        pauses.append(failed)
        return 0.0

    monkeypatch.setattr(environments.run, "pause_after", no_pause)
    await running.play(
        "Faulty", options={"how": "raises", "fails": 3}, group_size=1, concurrency=1, episodes=9
    )
    assert sorted(set(pauses)) == [1, 2, 3]
    assert len(pauses) < 8, "a group that did not fail ends the pauses"


async def test_sessions_that_are_opened_while_the_run_stops_are_ended(
    running: RunTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, stopped = itertools.count(1), asyncio.Event()
    open_session, ends_in = SessionClient.open_session, Patience.ends_in

    async def opens(self: SessionClient, *given: Any) -> Any:
        session = await open_session(self, *given)
        if next(opened) > 4:  # the third group
            await stopped.wait()
        return session

    def stops(self: Patience, seconds: float) -> None:
        stopped.set()
        ends_in(self, seconds)

    monkeypatch.setattr(SessionClient, "open_session", opens)
    monkeypatch.setattr(Patience, "ends_in", stops)
    with pytest.raises(RunStopped, match="the sandbox is gone"):
        await running.play(
            "Faulty", options={"how": "raises", "fails": 9}, group_size=2, concurrency=1, most_failed_groups=2
        )
    assert len(running.sessions()) == 6
    assert all(each["state"] == "finished" for each in running.sessions()), "no session waits"


@pytest.mark.parametrize(
    ("answers", "different", "said"),
    [
        ("?", 0, "0 of 4 groups have different rewards, so nothing is trained"),
        ("right", 0, "0 of 4 groups have different rewards, so nothing is trained"),
        ("both", 4, "4 of 4 groups had different rewards"),
    ],
)
async def test_a_run_that_can_teach_nothing_says_so_and_what_helps(
    running: RunTest, answers: str, different: int, said: str
) -> None:
    numbers = itertools.count()

    def answer(prompt: str) -> str:
        right = answers == "right" or (answers == "both" and next(numbers) % 2)
        return str(2 * int(re.findall(r"double of (\d)", prompt)[-1])) if right else "?"

    running.engine.answer = answer
    lines: list[str] = []
    settings = running.settings("Double", group_size=2, episodes=8, concurrency=1)
    summary = await play_run(settings, running.place, lines.append)
    assert summary["groups"] == {"compared": 4, "different": different}
    assert lines[-2 if not different else -1].endswith(said)
    helps = [line for line in lines if "an example in the prompt" in line and "temperature=0.6" in line]
    assert len(helps) == (not different)


async def test_a_run_says_that_the_training_is_paused_or_went_back(running: RunTest, redis_url: str) -> None:
    """Otherwise it would end as if all it has played had been trained."""
    done = RecoveryReport(
        version=9, restored=2, step=8, reason="secret", automatic=True, at=time.time() - 600
    )
    report: Any = TrainerReport(state="paused", last_seen=time.time(), recoveries=[done]).fields()
    with redis_at(redis_url.removesuffix("0") + "5") as redis:
        redis.hset(key_names.TRAINER, mapping=report)
    model = f"{running.url}/v1/models"
    await asyncio.to_thread(wait_until, lambda: httpx.get(model, timeout=120).json()["data"][0].get("notice"))
    lines: list[str] = []
    settings = running.settings("Double", group_size=2, episodes=2)
    summary = await play_run(settings, running.place, lines.append)
    notice = (
        "the training is paused; the training went back to version 2 10 min ago, after step 8, and goes on "
        "as version 9"
    )
    assert lines[0].endswith(f"; {notice}")
    assert summary["notice"] == notice


async def test_an_evaluation_and_groups_of_one_compare_nothing(running: RunTest) -> None:
    lines: list[str] = []
    both: list[dict[str, Any]] = [{"mode": "eval", "tasks": 3}, {"group_size": 1, "episodes": 3}]
    for number, given in enumerate(both):
        place = running.place_of(running.run_dir.with_name(f"run-{number}"))
        await play_run(running.settings("Double", **given), place, lines.append)
    assert not [line for line in lines if "groups" in line]


class Refusals:
    """A gateway that refuses calls. Each attempt takes so much time of the turned clock."""

    def __init__(self, turned: TurnedClock, status: int, takes_s: float, refuses: int = 10**6) -> None:
        self.turned, self.status, self.takes_s, self.refuses = turned, status, takes_s, refuses
        self.attempts: list[str] = []

    async def answer(self, request: Request) -> Response:
        self.attempts.append(request.headers["x-stainless-retry-count"])
        self.turned.turn(self.takes_s)
        if len(self.attempts) <= self.refuses:
            body = {"error": {"message": "all engines are full"}}
            return JSONResponse(body, self.status, {"retry-after": "0.001"})
        return JSONResponse(COMPLETION)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])


COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
}


async def said_by(url: str, waits_s: float) -> str:
    async with SessionClient(url, None, waits_s) as gateway:
        session = {"base_url": f"{url}/v1", "api_key": "key"}
        hi: Any = [{"role": "user", "content": "hi"}]
        answer = await gateway.model_client(session).chat.completions.create(model="policy", messages=hi)
        return answer.choices[0].message.content or ""


@pytest.mark.parametrize(
    ("status", "takes_s", "refuses", "attempts"),
    [
        (503, 1.0, 40, 41),
        (429, 20.0, 10**6, 15),
        (503, 20.0, 10**6, 15),
        (503, 400.0, 10**6, 1),
        (500, 400.0, 1, 2),
        (502, 85.0, 10**6, 5),
        (409, 1.0, 10**6, 1),
        (400, 1.0, 10**6, 1),
    ],
)
async def test_a_model_call_that_is_refused_is_made_again_until_wait_s(
    turned: TurnedClock, status: int, takes_s: float, refuses: int, attempts: int
) -> None:
    """An answer that was lost after a long time is not one that waited: a status but 429 and 503 begins the
    wait when it comes."""
    refusals = Refusals(turned, status, takes_s, refuses)
    with serving(refusals.app()) as url:
        if attempts > refuses:
            assert await said_by(url, 300.0) == "hi"
        else:
            with pytest.raises(APIStatusError, match="all engines are full") as raised:
                await said_by(url, 300.0)
            assert raised.value.status_code == status
    assert refusals.attempts == [str(number) for number in range(attempts)]


async def test_a_model_call_waits_for_a_gateway_that_is_away_until_wait_s(turned: TurnedClock) -> None:
    calling = asyncio.create_task(said_by(f"http://127.0.0.1:{free_port()}", 300.0))
    await asyncio.wait([calling], timeout=0.3)
    assert not calling.done()
    while not calling.done():
        turned.turn(100.0)
        await asyncio.wait([calling], timeout=0.3)
    with pytest.raises(APIConnectionError, match="gave no answer for 300 s"):
        await calling


async def test_calls_side_by_side_each_have_their_own_wait(turned: TurnedClock) -> None:
    refusals = Refusals(turned, 503, 1.0, refuses=60)
    with serving(refusals.app()) as url:
        assert await asyncio.gather(*(said_by(url, 300.0) for _ in range(4))) == ["hi"] * 4


async def test_a_group_that_can_teach_nothing_ends_early(running: RunTest) -> None:
    await running.play("Double", group_size=6, episodes=6, concurrency=1, stop_uniform_after=2)
    codes = Counter(each["verdict"]["code"] for each in running.sessions())
    assert codes["abandoned"] == 4, codes
    assert sum(bool(each["turns"]) for each in running.sessions()) < 6


async def test_a_failed_episode_leaves_nothing_to_compare_in_a_pair(running: RunTest) -> None:
    await running.play("Faulty", options={"how": "raises"}, group_size=2, episodes=2, concurrency=1)
    assert Counter(each["verdict"]["code"] for each in running.sessions()) == {"failed": 1, "abandoned": 1}


async def test_players_learn_or_are_frozen(running: RunTest) -> None:
    running.engine.answer = lambda prompt: "5" if "the other said" in prompt else "3"
    await running.play("Race", group_size=2, episodes=2)
    sessions = running.sessions()
    assert {each["group_id"][-1]: each["reward"] for each in sessions} == {"0": -1.0, "1": 1.0}
    assert len(sessions) == 4


async def test_a_frozen_opponent_is_neither_rewarded_nor_trained(running: RunTest) -> None:
    running.engine.answer = lambda prompt: "5" if "the other said" in prompt else "3"
    await running.play("Race", group_size=2, episodes=4, opponent="policy@0", concurrency=1)
    frozen = [each for each in running.sessions() if each["verdict"]["code"] == "not_for_training"]
    learning = [each for each in running.sessions() if each["verdict"]["code"] != "not_for_training"]
    assert (len(frozen), len(learning)) == (4, 4)
    assert all(each["reward"] is None and each["policy"] == "policy@0" for each in frozen)
    assert Counter(each["reward"] for each in learning) == {-1.0: 2, 1.0: 2}, "the learner's place changes"


async def test_a_mistake_in_a_name_is_told_at_once(running: RunTest) -> None:
    with pytest.raises(UnknownEnvironment, match="no environments of 'reasoning_gim'"):
        await play_run(RunSettings(environment="reasoning_gim:chain_sum"), running.place, lambda line: None)
    with pytest.raises(UnknownEnvironment, match=r"has no class 'Duoble'; it has .*Double"):
        await running.play("Duoble")
    with pytest.raises(UnknownEnvironment, match=r"cannot be started: .*nowhere"):
        await running.play("Double", python="/nowhere/python")


NOBODY_SERVES = "no server serves version 7; POST /admin/policies/7/pin has one keep it"


@pytest.mark.parametrize(
    ("command", "toy", "given", "said"),
    [
        ("eval", "Double", "--model policy@7", NOBODY_SERVES),
        ("eval", "Double", "--set model=policy@7", NOBODY_SERVES),
        ("run", "Double", "--set model=policy@7", NOBODY_SERVES),
        ("run", "Race", "--set opponent=policy@7", NOBODY_SERVES),
        ("eval", "Double", "--model policy:sums@7", "there is no adapter sums@7"),
        ("eval", "Double", "--model policy@seven", "a version is a number"),
        (
            "eval",
            "Double",
            "--model polcy@0",
            "there are no versions of 'polcy': the gateway serves 'policy'",
        ),
    ],
)
def test_a_version_that_nobody_serves_is_refused_before_anything_begins(
    running: RunTest, monkeypatch: pytest.MonkeyPatch, command: str, toy: str, given: str, said: str
) -> None:
    monkeypatch.setenv("WEIR_CLIENT_KEYS", "")
    place = ["--run-dir", str(running.run_dir), "--gateway", running.url]
    ended = CliRunner().invoke(app, ["env", command, f"{TOYS}:{toy}", *place, *given.split()])
    assert ended.exit_code == 1
    assert said in str(ended.exception or ended.output)
    assert not running.sessions()
    assert not running.run_dir.exists(), "the same command may be given again"


@pytest.mark.parametrize(
    ("toy", "served", "given"),
    [
        ("Double", 4, {"mode": "eval", "model": "policy@0", "tasks": 8, "group_size": 1}),
        ("Race", 3, {"opponent": "policy@0", "group_size": 2, "episodes": 8}),
        ("Race", 4, {"opponent": "policy@0", "group_size": 2, "episodes": 8}),
    ],
)
async def test_a_version_that_is_served_no_more_ends_the_run_which_can_go_on_later(
    running: RunTest, toy: str, served: int, given: dict[str, Any]
) -> None:
    calls = itertools.count()

    def answer(prompt: str) -> str:
        running.engine.version = "0" if next(calls) < served else "1"
        return "5"

    running.engine.answer = answer
    with pytest.raises(GatewayFault, match=r"'policy@0' answers no calls: .*no server serves version 0"):
        await running.play(toy, concurrency=2, **given)
    assert not running.sessions(verdict="failed")
    assert not running.sessions(state="open")
    running.engine.version, running.engine.answer = "0", lambda prompt: "5"
    model = f"{running.url}/v1/models/policy@0"
    await wait_until_async(lambda: httpx.get(model, timeout=120).status_code == 200)
    summary = await running.play(toy, concurrency=2, resume=True, **given)
    # An episode that is alone in a group that learns is not played again. Two groups play at once.
    ended = summary["by_status"]
    assert ended["completed"] + ended.get("abandoned", 0) == 8
    assert ended.get("abandoned", 0) <= (2 if toy == "Race" else 0)


async def test_a_run_opens_no_more_sessions_than_it_plays(running: RunTest) -> None:
    """At most the episodes of one group wait for a slot, and one more group is opened meanwhile."""
    most = 0

    def answer(prompt: str) -> str:
        nonlocal most
        most = max(most, len(running.sessions(state="open")))
        return "8"

    running.engine.answer = answer
    await running.play("Double", group_size=3, episodes=12, concurrency=3)
    assert most <= 3 + 2 * 3


async def test_a_session_that_is_deleted_meanwhile_ends_no_run(running: RunTest) -> None:
    deleted: list[str] = []

    def answer(prompt: str) -> str:
        if not deleted:
            deleted.append(running.sessions(state="open")[0]["session_id"])
            assert httpx.delete(f"{running.url}/sessions/{deleted[0]}", timeout=120).status_code == 200
        return "8"

    running.engine.answer = answer
    summary = await running.play("Double", mode="eval", tasks=4, group_size=1, concurrency=1)
    assert summary["by_status"] == {"failed": 1, "completed": 3}
    assert any("deleted" in reason or "410" in reason for reason in summary["reasons"])


async def test_a_call_of_a_tool_that_nobody_offered_is_a_wrong_answer(running: RunTest) -> None:
    running.engine.answer = lambda prompt: '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    summary = await running.play("Double", mode="eval", tasks=1, group_size=1)
    assert summary["by_status"] == {"completed": 1}
    assert summary["reward"]["mean"] == 0.0


# Loops


async def test_an_episode_that_its_environment_cuts_off_is_truncated_with_what_it_earned(
    running: RunTest,
) -> None:
    summary = await running.play("Cut", group_size=1, episodes=1)
    assert summary["by_status"] == {"truncated": 1}
    (session,) = running.sessions()
    assert (session["status"], session["reward"]) == ("truncated", 1.0)
    assert [turn["reward"] for turn in session["turns"]] == [0.5, None]


async def test_a_conversation_that_no_longer_fits_is_truncated_and_not_failed(running: RunTest) -> None:
    running.engine.answer = lambda prompt: "1 " * 2100  # two such answers fill the context
    summary = await running.play("Count", group_size=1, episodes=1)
    assert summary["by_status"] == {"truncated": 1}
    assert list(summary["reasons"]) == ["the conversation does not fit into the model's context"]
    (session,) = running.sessions()
    assert session["status"] == "truncated"
    assert 0 < len(session["turns"]) < 3, "what was sampled before is recorded"


async def test_an_episode_that_lasts_too_long_is_truncated(
    turned: TurnedClock, running: RunTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments.hosts, "CLOSES_WITHIN_S", 0.2)
    given = {"group_size": 1, "episodes": 1, "episode_s": 1000.0, "step_s": 3600.0}
    summary = await hung_for(1000, turned, running, tmp_path / "it hangs", **given)
    assert summary["by_status"] == {"truncated": 1}
    (session,) = running.sessions()
    assert (session["status"], session["reward"]) == ("truncated", None)


async def test_calls_of_one_answer_are_made_one_after_the_other(running: RunTest) -> None:
    def answer(prompt: str) -> str:
        if "taken: a, b" in prompt:
            return "done"
        calls = ({"name": "take", "arguments": {"name": name}} for name in "ab")
        return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)

    running.engine.answer = answer
    await running.play("Taking", group_size=1, episodes=1)
    (session,) = running.sessions()
    assert session["reward"] == 1.0
    _, second = session["turns"]
    assert second["relation"] == "extends"
    assert re.findall(r"taken: (\w(?:, \w)*)", second["context_text"]) == ["a", "a, b"]


async def test_a_loop_of_the_users_own_plays_the_episodes(running: RunTest) -> None:
    """The loop asks for a draft first, and only the second answer is a step of the environment."""
    running.engine.answer = lambda prompt: "0" if "again" in prompt else "a draft"
    loop = "tests.support.environments.drafts:play"
    await running.play("Double", loop=loop, mode="eval", tasks=1, group_size=1)
    (session,) = running.sessions()
    assert [turn["relation"] for turn in session["turns"]] == ["root", "extends"]
    assert session["reward"] == 1.0


# Images


@pytest.fixture
def seeing(redis_url: str, tmp_path: Path) -> Iterator[RunTest]:
    model = make_tiny_vision_model(tmp_path / "model")
    with running_gateway(redis_url, model, tmp_path) as running:
        yield running


async def test_the_model_sees_what_an_environment_shows(seeing: RunTest) -> None:
    seeing.engine.answer = lambda prompt: "noise"
    summary = await seeing.play("Picture", group_size=2, episodes=2, concurrency=1)
    assert summary["by_status"] == {"completed": 2}
    for session in seeing.sessions():
        one, two = session["turns"]
        assert (two["relation"], session["reward"]) == ("extends", 1.0)
        assert [len(turn["images"]) for turn in (one, two)] == [1, 1]
        assert one["images"][0]["sha256"] != two["images"][0]["sha256"]
    last = seeing.engine.requests[-1]["image_data"]
    shown = [opened(url).tobytes() for url in last]
    assert len(shown) == 2
    seeds = [seed for seed in range(20) if image_of(96, 64, seed).tobytes() in shown]
    assert len(seeds) == 2


async def test_a_text_model_ends_episodes_that_show_images(running: RunTest) -> None:
    summary = await running.play("Picture", group_size=1, episodes=1)
    assert summary["by_status"] == {"failed": 1}
