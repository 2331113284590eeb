"""The demo: its task, the token ids of its warm start, its criterion of success, its report."""

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from gateway.app import create_app
from gateway.language.render import ChatRenderer
from gateway.settings.service import GatewaySettings
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.serving import free_port, serving
from weir.demo.episodes import WINDOW, EpisodeLog, EpisodeRunner
from weir.demo.observer import Observation
from weir.demo.plan import CONTEXT_LENGTH, TOOLS, ToolExamples, write_plan
from weir.demo.report import account, criterion, draw
from weir.demo.task import ToolTask, call_text
from weir.demo.task import draw as draw_task
from weir.errors import StackError


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    write_plan(directory)
    return directory


@pytest.fixture
def engine(plan: Path) -> FakeEngine:
    return FakeEngine(Tokenizer.from_file(str(plan / "tokenizer.json")))


@pytest.fixture
def gateway_url(plan: Path, engine: FakeEngine, redis_url: str) -> Iterator[str]:
    with serving(engine.app()) as engine_url:
        settings = GatewaySettings(redis_url=redis_url, model_path=plan, engines=[engine_url])
        with serving(create_app(settings)) as url:
            yield url


def rows(path: Path) -> list[dict[str, list[int]]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def play(url: str, count: int, size: int) -> EpisodeLog:
    episodes = EpisodeRunner(url, "none", group_size=size, groups_in_flight=1, seed=0)
    return asyncio.run(episodes.play(lambda record: len(record.episodes) >= count))


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


def test_only_the_value_is_rewarded() -> None:
    task = ToolTask("c", "7")
    assert [task.reward(answer) for answer in ("7", " 7\n", "8", "unknown", "")] == [1, 1, 0, 0, 0]


def session_ids(gateway_url: str) -> set[str]:
    names: set[str] = set()
    cursor = "0"
    while cursor:
        page = httpx.get(
            f"{gateway_url}/sessions", params={"limit": 1000, "cursor": cursor}, timeout=120
        ).json()
        names |= {session["session_id"] for session in page["data"]}
        cursor = page["next_cursor"]
    return names


def test_the_warm_start_learns_the_ids_that_the_gateway_records(
    plan: Path, engine: FakeEngine, gateway_url: str
) -> None:
    """A perfect tool loop through the real gateway records exactly the ids and mask of a row of the plan."""
    task = draw_task(Random(0))  # the first task of the episodes with seed 0
    engine.script = deque([call_text(task.key), task.value])
    before = session_ids(gateway_url)
    record = play(gateway_url, count=1, size=1)
    assert [episode.reward for episode in record.episodes] == [1.0]
    (session_id,) = session_ids(gateway_url) - before
    view = httpx.get(f"{gateway_url}/sessions/{session_id}?tokens=true", timeout=120).json()
    ids: list[int] = []
    mask: list[int] = []
    for turn in view["turns"]:
        ids += turn["context_ids"] + turn["output_ids"]
        mask += [0] * len(turn["context_ids"]) + [1] * len(turn["output_ids"])
    assert {"ids": ids, "mask": mask} in rows(plan / "probe.jsonl")
    assert (ids, mask) == ToolExamples(ChatRenderer(plan)).uses_tool(task)


def test_the_gateway_renders_what_the_models_own_template_says(plan: Path) -> None:
    from transformers import AutoTokenizer

    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"key": "c"}'}}
    conversations: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "value of c?"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "value of c?"}],
        [
            {"role": "user", "content": "value of c?"},
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


def test_episodes_are_counted_rewarded_and_accounted_for(engine: FakeEngine, gateway_url: str) -> None:
    before = account(gateway_url, "none")
    engine.script = deque(["unknown"] * 4)
    record = play(gateway_url, count=4, size=4)
    assert [episode.reward for episode in record.episodes] == [0.0] * 4
    verdicts = account(gateway_url, "none")
    assert verdicts.get("ready", 0) - before.get("ready", 0) == 4


def test_a_call_that_fails_ends_its_episode_as_failed(engine: FakeEngine, gateway_url: str) -> None:
    engine.mind = [10**6]  # the answer to each retry of the gateway and the client, too
    before = account(gateway_url, "none").get("failed", 0)
    record = play(gateway_url, count=1, size=1)
    assert record.failures == 1
    assert record.episodes[0].reward is None
    assert account(gateway_url, "none")["failed"] == before + 1


def test_a_gateway_that_is_gone_is_one_sentence() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StackError, match=f"the gateway at {nowhere} does not answer"):
        play(nowhere, count=1, size=1)


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
