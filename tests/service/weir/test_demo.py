"""The demo and the guessing game: tasks, token ids of their warm starts, criterion of success, report."""

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from bench.guess import GUESSES, NUMBERS, GuessGame, SecretNumber, blind, halving, write_guess_plan
from gateway.app import create_app
from gateway.language.render import ChatRenderer
from gateway.language.tokenizer_files import tokenizer_of
from gateway.settings import GatewaySettings
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.redis_clients import redis_at
from tests.support.serving import free_port, serving
from weir.demo.demo_episodes import WINDOW, EpisodeLog, EpisodeRunner
from weir.demo.observer import Observation
from weir.demo.report import account, criterion, draw
from weir.demo.student import CONTEXT_LENGTH, TOOLS, ToolExamples, write_plan
from weir.demo.task import ToolTask, call_text
from weir.demo.task import draw as draw_task
from weir.errors import StackError


@dataclass(frozen=True)
class TaskGateway:
    """A gateway with the model of a task's warm start, and an empty Redis."""

    plan: Path
    engine: FakeEngine
    url: str

    def sessions(self) -> list[dict[str, Any]]:
        page = httpx.get(f"{self.url}/sessions", params={"limit": 1000}, timeout=120).json()
        found: list[dict[str, Any]] = page["data"]
        return found

    def recorded(self) -> tuple[int, dict[str, list[int]]]:
        """The turns of the only session, and its ids and mask as in a row of the plan."""
        (session,) = self.sessions()
        path = f"/sessions/{session['session_id']}?tokens=true"
        turns = httpx.get(self.url + path, timeout=120).json()["turns"]
        row: dict[str, list[int]] = {"ids": [], "mask": []}
        for turn in turns:
            row["ids"] += turn["context_ids"] + turn["output_ids"]
            row["mask"] += [0] * len(turn["context_ids"]) + [1] * len(turn["output_ids"])
        return len(turns), row


@contextmanager
def task_gateway(plan: Path, redis_url: str, **settings: Any) -> Iterator[TaskGateway]:
    with redis_at(redis_url) as redis:
        redis.flushdb()
    engine = FakeEngine(tokenizer_of(plan))
    with serving(engine.app()) as engine_url:
        given = GatewaySettings(redis_url=redis_url, model_path=plan, engines=[engine_url], **settings)
        with serving(create_app(given)) as url:
            yield TaskGateway(plan, engine, url)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    write_plan(directory)
    return directory


@pytest.fixture(scope="module")
def guess_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("guess_plan")
    write_guess_plan(directory)
    return directory


@pytest.fixture
def tool(plan: Path, redis_url: str) -> Iterator[TaskGateway]:
    with task_gateway(plan, redis_url) as gateway:
        yield gateway


@pytest.fixture
def game(guess_plan: Path, redis_url: str) -> Iterator[TaskGateway]:
    with task_gateway(guess_plan, redis_url, thinking="all") as gateway:
        yield gateway


def rows(path: Path) -> list[dict[str, list[int]]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def play(url: str, count: int = 1, size: int = 1, **more: Any) -> EpisodeLog:
    given = {"group_size": size, "groups_in_flight": 1, "seed": 0} | more
    episodes = EpisodeRunner(url, "none", **given)
    return asyncio.run(episodes.play(lambda record: len(record.episodes) >= count))


def guess(url: str, **more: Any) -> EpisodeLog:
    return play(url, game=GuessGame(), **more)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("get", '{"key": "c"}', "c = 7"),
        ("get", '{"key": "d"}', "d = 8"),
        ("put", '{"key": "c"}', "error: no such tool"),
        ("get", '{"key": 3}', "error: no such tool"),
        ("get", "{nonsense", "error: give a key"),
        ("get", "[]", "error: give a key"),
    ],
)
def test_the_tool_answers_whatever_the_model_makes_of_it(name: str, arguments: str, said: str) -> None:
    assert ToolTask("c", "7").tool(name, arguments) == said


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("4", "higher"),
        (" 9\n", "lower"),
        ("7", None),
        ("seven", "a number"),
        ("", "a number"),
        ("-7", "a number"),
    ],
)
def test_the_game_answers_whatever_the_model_makes_of_it(said: str, hint: str | None) -> None:
    assert SecretNumber(7).hint(said) == hint


def test_only_the_value_is_rewarded() -> None:
    task = ToolTask("c", "7")
    assert [task.reward(answer) for answer in ("7", " 7\n", "8", "unknown", "")] == [1, 1, 0, 0, 0]


def test_halving_finds_every_number_and_blind_guesses_a_third() -> None:
    assert all(len(halving(SecretNumber(number))) <= GUESSES for number in NUMBERS)
    random, tries = Random(0), 200
    found = sum(number in blind(SecretNumber(number), random) for number in NUMBERS for _ in range(tries))
    assert 0.25 < found / (tries * len(NUMBERS)) < 0.45


def test_the_warm_start_learns_the_ids_that_the_gateway_records(tool: TaskGateway) -> None:
    """A perfect tool loop through the real gateway records exactly the ids and mask of a row of the plan."""
    task = draw_task(Random(0))  # the first task of the episodes with seed 0
    tool.engine.script = deque([call_text(task.key), task.value])
    assert [episode.reward for episode in play(tool.url).episodes] == [1.0]
    _, row = tool.recorded()
    assert row in rows(tool.plan / "probe.jsonl")
    assert (row["ids"], row["mask"]) == ToolExamples(ChatRenderer(tool.plan)).uses_tool(task)


def test_a_game_is_one_row_of_the_plan_however_many_turns_it_has(game: TaskGateway) -> None:
    (secret,) = GuessGame().group(Random(1), 1)
    game.engine.script = deque(map(str, halving(secret)))
    assert [episode.reward for episode in guess(game.url, seed=1).episodes] == [1.0]
    assert game.sessions()[0]["task_id"] == f"guess-{secret.number}"
    turns, row = game.recorded()
    assert turns == len(halving(secret)) > 2
    assert row in rows(game.plan / "probe.jsonl")


def test_the_gateway_renders_what_the_models_own_template_says(plan: Path) -> None:
    from transformers import AutoTokenizer

    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"key": "c"}'}}
    question = {"role": "user", "content": "value of c?"}
    conversations: list[list[dict[str, Any]]] = [
        [question],
        [{"role": "system", "content": "be brief"}, question],
        [
            question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "c = 7"},
            {"role": "tool", "content": "c = 8"},
        ],
    ]
    template, renderer = AutoTokenizer.from_pretrained(plan), ChatRenderer(plan)
    for messages in conversations:
        for tools in (TOOLS, None):
            whole = template.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            assert renderer.render(messages, tools).tolist() == whole


def test_every_row_fits_the_context(plan: Path) -> None:
    for name in ("clean", "habit", "probe"):
        assert max(len(row["ids"]) for row in rows(plan / f"{name}.jsonl")) < CONTEXT_LENGTH


def test_episodes_are_counted_rewarded_and_accounted_for(tool: TaskGateway) -> None:
    tool.engine.script = deque(["unknown"] * 4)
    record = play(tool.url, count=4, size=4)
    assert [episode.reward for episode in record.episodes] == [0.0] * 4
    assert account(tool.url, "none")["ready"] == 4


def test_a_call_that_fails_ends_its_episode_as_failed(tool: TaskGateway) -> None:
    tool.engine.mind = [10**6]  # the answer to each retry of the gateway and the client, too
    record = play(tool.url)
    assert record.failures == 1
    assert record.episodes[0].reward is None
    assert account(tool.url, "none")["failed"] == 1


def test_an_agent_that_never_finds_the_number_gets_no_reward(game: TaskGateway) -> None:
    (secret,) = GuessGame().group(Random(0), 1)
    wrong = str((secret.number + 1) % 10)
    game.engine.script = deque([wrong] * (GUESSES + 1))
    assert [episode.reward for episode in guess(game.url).episodes] == [0.0]
    assert len(game.engine.script) == 1


def test_evaluations_are_not_trained(game: TaskGateway) -> None:
    game.engine.script = deque(["x"] * GUESSES)
    guess(game.url, seed=2, train=False)
    assert [each["verdict"]["code"] for each in game.sessions()] == ["not_for_training"]


def test_a_refused_agent_comes_again_after_the_retry_after() -> None:
    """The agent then plays the same task, because refusals do not change which tasks a seed gives."""
    asked: list[str] = []

    async def groups(request: Request) -> JSONResponse:
        asked.append((await request.json())["task_id"])
        return JSONResponse({}, 429, {"retry-after": "3600"})

    with serving(Starlette(routes=[Route("/groups", groups, methods=["POST"])])) as url:
        episodes = EpisodeRunner(
            url, "none", group_size=1, groups_in_flight=1, seed=0, game=GuessGame(), retry_every_s=0.001
        )
        record = asyncio.run(episodes.play(lambda _: len(asked) >= 3))
    (secret,) = GuessGame().group(Random(0), 1)
    assert asked == [f"guess-{secret.number}"] * 3
    assert not record.episodes


def test_a_gateway_that_is_gone_is_one_sentence() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StackError, match=f"the gateway at {nowhere} does not answer"):
        play(nowhere)


def filled(*rewards: float) -> EpisodeLog:
    record = EpisodeLog()
    for reward in rewards:
        for _ in range(WINDOW):
            record.add(reward, None)
    return record


@pytest.mark.parametrize(
    ("rewards", "versions", "trained", "missed"),
    [
        ((0.1, 0.95), 10, 2 * WINDOW, set()),
        ((0.4, 0.95), 10, 2 * WINDOW, {"starts_below"}),
        ((0.1, 0.85), 10, 2 * WINDOW, {"reaches"}),
        ((0.1, 0.95), 9, 2 * WINDOW, {"versions"}),
        ((0.1, 0.95), 10, 2 * WINDOW - 1, {"accounted_for"}),
        ((), 0, 0, {"starts_below", "reaches", "versions"}),
    ],
)
def test_the_criterion_names_what_is_missed(
    rewards: tuple[float, ...], versions: int, trained: int, missed: set[str]
) -> None:
    met = criterion(filled(*rewards), versions, {"trained": trained})
    assert {name for name, holds in met.items() if not holds and name != "met"} == missed
    assert met["met"] is not bool(missed)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    draw(tmp_path / "reward.png", filled(0.1, 0.9), Observation(staleness_at=[(0.0, 1.0)]))
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
