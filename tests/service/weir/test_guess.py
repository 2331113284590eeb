"""The guessing game: its answers to guesses, the token ids of its warm start, and which strategies win."""

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from gateway.app import create_app
from gateway.settings.service import GatewaySettings
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.redis_clients import redis_at
from tests.support.serving import serving
from weir.demo.episodes import EpisodeLog, EpisodeRunner
from weir.demo.guess import GUESSES, NUMBERS, GuessGame, SecretNumber, blind, halving
from weir.demo.guess_plan import write_guess_plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    write_guess_plan(directory)
    return directory


@pytest.fixture
def engine(plan: Path) -> FakeEngine:
    return FakeEngine(Tokenizer.from_file(str(plan / "tokenizer.json")))


@pytest.fixture
def gateway_url(plan: Path, engine: FakeEngine, redis_url: str) -> Iterator[str]:
    with redis_at(redis_url) as redis:
        redis.flushdb()  # the tests look at the newest sessions only
    with serving(engine.app()) as engine_url:
        settings = GatewaySettings(redis_url=redis_url, model_path=plan, engines=[engine_url], thinking="all")
        with serving(create_app(settings)) as url:
            yield url


def play(url: str, seed: int = 0, train: bool = True) -> EpisodeLog:
    episodes = EpisodeRunner(
        url, "none", group_size=1, groups_in_flight=1, seed=seed, game=GuessGame(), train=train
    )
    return asyncio.run(episodes.play(lambda record: len(record.episodes) >= 1))


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


def test_halving_finds_every_number_and_blind_guesses_a_third() -> None:
    assert all(len(halving(SecretNumber(number))) <= GUESSES for number in NUMBERS)
    random, tries = Random(0), 200
    found = sum(number in blind(SecretNumber(number), random) for number in NUMBERS for _ in range(tries))
    assert 0.25 < found / (tries * len(NUMBERS)) < 0.45


def test_the_warm_start_learns_the_ids_that_the_gateway_records(
    plan: Path, engine: FakeEngine, gateway_url: str
) -> None:
    """A game through the real gateway records exactly one row of the plan, however many turns it has."""
    (secret,) = GuessGame().group(Random(1), 1)
    engine.script = deque(map(str, halving(secret)))
    record = play(gateway_url, seed=1)
    assert [episode.reward for episode in record.episodes] == [1.0]
    newest = httpx.get(f"{gateway_url}/sessions", params={"limit": 1000}, timeout=120).json()["data"]
    (session_id,) = [row["session_id"] for row in newest if row.get("task_id") == f"guess-{secret.number}"]
    view = httpx.get(f"{gateway_url}/sessions/{session_id}?tokens=true", timeout=120).json()
    assert len(view["turns"]) == len(halving(secret)) > 2
    ids: list[int] = []
    mask: list[int] = []
    for turn in view["turns"]:
        ids += turn["context_ids"] + turn["output_ids"]
        mask += [0] * len(turn["context_ids"]) + [1] * len(turn["output_ids"])
    lines = (plan / "probe.jsonl").read_text(encoding="utf-8").splitlines()
    assert {"ids": ids, "mask": mask} in [json.loads(line) for line in lines]


def test_an_agent_that_never_finds_the_number_gets_no_reward(engine: FakeEngine, gateway_url: str) -> None:
    (secret,) = GuessGame().group(Random(0), 1)
    wrong = str((secret.number + 1) % 10)
    engine.script = deque([wrong] * (GUESSES + 1))
    assert [episode.reward for episode in play(gateway_url).episodes] == [0.0]
    assert len(engine.script) == 1


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


def test_evaluations_are_not_trained(engine: FakeEngine, gateway_url: str) -> None:
    engine.script = deque(["x"] * GUESSES)
    play(gateway_url, seed=2, train=False)
    rows = httpx.get(f"{gateway_url}/sessions", params={"limit": 1000}, timeout=120).json()["data"]
    assert any(row["verdict"]["code"] == "not_for_training" for row in rows), rows
