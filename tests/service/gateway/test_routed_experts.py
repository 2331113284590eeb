"""Mixtures of experts: a turn records which experts the engine chose for each of its tokens."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.app import create_app
from gateway.fleet.event_stream import EventStream
from gateway.generations import generation
from gateway.settings import GatewaySettings
from rollout_queue.contract.records import RoutedExperts
from tests.support.gateway.conversation import recorded
from tests.support.gateway.fake_engine import Interruption
from tests.support.gateway.running import Backends, RunningGateway


@pytest.fixture(scope="module")
def mixture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with the configuration of a mixture of experts."""
    directory = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(tiny_model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    return directory


@pytest.fixture(scope="module")
def replaying_url(backends: Backends, mixture: Path) -> Iterator[tuple[str, bytes]]:
    """A gateway that records experts, and its secret."""
    backends.clear(None)
    with backends.gateway_url(model_path=mixture, router_replay=True) as url:
        yield url, backends.secret()


@pytest.fixture
def replaying(backends: Backends, replaying_url: tuple[str, bytes]) -> Iterator[RunningGateway]:
    with backends.shared(*replaying_url) as gateway:
        gateway.engine.expert_of = expert_of
        yield gateway


def expert_of(position: int) -> int:
    return position % 251


def expected(first: int, end: int) -> RoutedExperts:
    """What is recorded of the tokens [first, end)."""
    return RoutedExperts(1, 1, bytes(map(expert_of, range(first, end))))


def test_each_turn_records_the_experts_from_its_parents_last_token_on(replaying: RunningGateway) -> None:
    session = replaying.session()
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        reply = replaying.chat(session=session, messages=messages)
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "and now"}]
    one, two = recorded(replaying, session["session_id"])
    end = len(one.context_ids) + len(one.output_ids)
    assert two.parent_id == one.turn_id
    assert one.experts == expected(0, end - 1)
    assert two.experts == expected(end - 1, end + len(two.context_ids) + len(two.output_ids) - 1)


def test_experts_are_requested_only_for_what_is_trained(
    replaying: RunningGateway, backends: Backends
) -> None:
    asked = replaying.engine.requests
    replaying.chat()
    assert (asked[-1]["return_routed_experts"], asked[-1]["routed_experts_start_len"]) == (True, 0)
    replaying.chat(session=replaying.session(train=False))
    assert "return_routed_experts" not in asked[-1]
    with backends.gateway() as plain:
        plain.chat()
    assert "return_routed_experts" not in asked[-1]


def test_another_engine_that_continues_the_answer_tells_the_experts_of_all_tokens(
    replaying: RunningGateway,
) -> None:
    replaying.engine.mind = list(range(100, 200))
    replaying.engine.interruptions.append(Interruption(64, "abort"))
    reply = replaying.chat()
    (turn,) = recorded(replaying, reply.headers["x-weir-session-id"])
    assert len(replaying.engine.requests) == 2
    assert turn.experts == expected(0, len(turn.context_ids) + len(turn.output_ids) - 1)


def test_an_answer_with_a_broken_record_is_good(replaying: RunningGateway) -> None:
    for told in (None, "", "AAAA", "/////w==", "AAAAAAAAAAA="):
        replaying.engine.last_words["routed_experts"] = told
        reply = replaying.chat()
        assert reply.status_code == 200, told
        (turn,) = recorded(replaying, reply.headers["x-weir-session-id"])
        assert (turn.experts, len(turn.output_ids) > 0) == (None, True), told


def test_a_long_turn_records_the_experts_of_its_last_tokens(
    replaying: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MOST_TOKENS_WITH_EXPERTS", 4)
    reply = replaying.chat("a longer message than four tokens")
    (turn,) = recorded(replaying, reply.headers["x-weir-session-id"])
    tokens = len(turn.context_ids) + len(turn.output_ids)
    assert replaying.engine.requests[-1]["routed_experts_start_len"] == len(turn.context_ids) - 4
    assert turn.experts == expected(tokens - 5, tokens - 1)


def test_a_gateway_of_a_dense_model_refuses_to_record_experts(tiny_model: Path) -> None:
    settings = GatewaySettings(model_path=tiny_model, router_replay=True, client_keys=["k"])
    with pytest.raises(SystemExit, match=r"gateway\.router_replay: .* is no mixture of experts"):
        create_app(settings)


def test_a_long_event_with_experts_is_read() -> None:
    """An event with the experts of long answers is longer than any other event may be."""
    meta: dict[str, Any] = {"completion_tokens": 1, "prompt_tokens": 1, "finish_reason": {"type": "stop"}}
    meta |= {"output_token_logprobs": [[-1.0, 5, None]], "weight_version": "0", "routed_experts": "AAAAAA=="}
    event = json.dumps({"output_ids": [5], "padding": " " * 2**26, "meta_info": meta}).encode()
    stream = EventStream(experts_from=0)
    assert stream.feed(b"data: " + event) == []
    (chunk,) = stream.feed(b"\n\n")
    assert chunk.experts == RoutedExperts(1, 1, b"\0")


def test_an_answer_of_token_ids_has_the_experts_that_were_asked_for(replaying: RunningGateway) -> None:
    def generate(ids: list[int], **sampling: Any) -> dict[str, Any]:
        body = {"token_ids": ids, "sampling_params": sampling}
        reply = replaying.post("/inference/v1/generate", body, headers={"x-session-id": "trace"})
        choice: dict[str, Any] = reply.json()["choices"][0]
        return choice

    def rows(choice: dict[str, Any]) -> list[int]:
        told = choice["routed_experts"]
        numbers = list(base64.b64decode(told["data"]))
        assert (told["shape"], told["dtype"]) == ([len(numbers), 1, 1], "uint8")
        return [told["start"], *numbers]

    first = generate([5, 6, 7])
    end = 3 + len(first["token_ids"])
    assert rows(first) == [0, *map(expert_of, range(end - 1))]
    second = generate([5, 6, 7, *first["token_ids"], 8], routed_experts_prompt_start=1)
    whole = end + 1 + len(second["token_ids"])
    assert rows(second) == [1, *map(expert_of, range(1, whole - 1))]
    third = generate([5, 6, 7, *first["token_ids"], 8], return_routed_experts=False)
    assert "routed_experts" not in third
    one, two, _ = recorded(replaying, "trace")
    assert (one.experts, two.experts) == (expected(0, end - 1), expected(end - 1, whole - 1))
    refused = replaying.post(
        "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"routed_experts_prompt_start": 1}}
    )
    assert refused.json()["error"]["param"] == "sampling_params.routed_experts_prompt_start"
