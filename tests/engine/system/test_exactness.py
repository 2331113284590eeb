"""Token exactness: the engine's tokens are recorded unchanged, and the next turn begins with them."""

import json
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.app import create_app
from gateway.settings import GatewaySettings
from rollout_queue.contract.packed_tokens import Logprobs
from tests.support.clients.proxies import Proxy
from tests.support.gateway.fake_engine import FakeEngine, Interruption
from tests.support.serving import serving
from tests.support.system.real_system import System
from tests.support.system.turns import scored
from tests.support.tolerances import ulps


@dataclass
class Tee(Proxy):
    """A proxy between gateway and engine that keeps a copy of each request for tokens and its answer."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    answered: list[list[dict[str, Any]]] = field(default_factory=list)

    async def forward(self, request: Request) -> Response:
        if request.url.path != "/generate":
            return await super().forward(request)
        body = await request.body()
        self.asked.append(json.loads(body))
        self.answered.append([])
        return StreamingResponse(self._lines(body, self.answered[-1]), media_type="text/event-stream")

    async def _lines(self, body: bytes, answer: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        headers = {"content-type": "application/json"}
        async with (
            httpx.AsyncClient(timeout=300) as client,
            client.stream("POST", f"{self.url}/generate", content=body, headers=headers) as reply,
        ):
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    answer.append(json.loads(line[6:]))
                yield f"{line}\n".encode()

    def sampled(self, index: int) -> tuple[list[int], list[float]]:
        """Ids and logprobs of one answer, joined from the engine's increments."""
        triples = [t for event in self.answered[index] for t in event["meta_info"]["output_token_logprobs"]]
        return [token for _, token, _ in triples], [logprob for logprob, _, _ in triples]


@dataclass
class Watched:
    """A gateway whose traffic with the real engine passes through the proxy."""

    url: str
    tee: Tee

    def session(self) -> tuple[dict[str, Any], openai.OpenAI]:
        """A new session, and a client for it."""
        ticket = httpx.post(f"{self.url}/sessions", json={}, timeout=120).raise_for_status().json()
        return ticket, openai.OpenAI(base_url=ticket["base_url"], api_key=ticket["api_key"], max_retries=0)

    def turns(self, ticket: dict[str, Any]) -> list[Any]:
        found: list[Any] = httpx.get(
            f"{self.url}/sessions/{ticket['session_id']}?tokens=true", timeout=120
        ).json()["turns"]
        return found


@pytest.fixture(scope="module")
def watched(system: System, redis_url: str, tiny_model: Path) -> Iterator[Watched]:
    tee = Tee(system.engine_url)
    with serving(tee.app()) as tee_url:
        settings = GatewaySettings(redis_url=redis_url, model_path=tiny_model, engines=[tee_url])
        with serving(create_app(settings)) as url:
            yield Watched(url, tee)


def float32(logprobs: list[float]) -> list[float]:
    return Logprobs(logprobs).tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_the_record_is_what_the_engine_returned_and_turn_two_begins_with_it(
    watched: Watched, stream: bool
) -> None:
    ticket, client = watched.session()
    first_call = len(watched.tee.asked)
    history: list[Any] = [{"role": "user", "content": "what is the value of a? ünïcödé 漢字 🙂"}]
    for tool_says in ("a = 7", "a = 8"):
        arguments: Any = {"model": "m", "messages": history, "max_tokens": 24}
        if stream:
            chunks = client.chat.completions.create(**arguments, stream=True)
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            content = client.chat.completions.create(**arguments).choices[0].message.content or ""
        history += [
            {"role": "assistant", "content": content},
            {"role": "tool", "tool_call_id": "c", "content": tool_says},
        ]
    one, two = watched.turns(ticket)
    for index, turn in ((first_call, one), (first_call + 1, two)):
        ids, logprobs = watched.tee.sampled(index)
        assert turn["output_ids"] == ids
        assert turn["logprobs"] == float32(logprobs)
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"])
    assert watched.tee.asked[first_call]["input_ids"] == one["context_ids"]
    whole = one["context_ids"] + one["output_ids"] + two["context_ids"]
    assert watched.tee.asked[first_call + 1]["input_ids"] == whole


@pytest.mark.long
def test_usage_tells_what_the_engine_had_cached(watched: Watched) -> None:
    _, client = watched.session()
    cached = []
    for _ in range(2):
        messages: Any = [{"role": "user", "content": "is this prompt cached? " * 20}]
        reply = client.chat.completions.create(model="m", messages=messages, max_tokens=4)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
        assert cached[-1] == watched.tee.answered[-1][-1]["meta_info"]["cached_tokens"]
    assert cached[1] is not None
    assert cached[1] > 20


def test_the_engine_scores_the_recorded_tokens_as_recorded(watched: Watched, system: System) -> None:
    ticket, client = watched.session()
    client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "score this"}], max_tokens=32
    )
    (turn,) = watched.turns(ticket)
    rescored = scored(system.engine_url, turn)
    differences = [abs(a - b) for a, b in zip(rescored, turn["logprobs"], strict=True)]
    # The log-probabilities are near -ln 1024. Each comes from float32 sums: some of up to 128 products, and
    # one over a vocabulary of 1,024.
    assert max(differences) <= ulps(1024, of=math.log(1024))
    assert sum(differences) / len(differences) <= ulps(128, of=math.log(1024))


def test_the_fake_engine_speaks_as_the_real_one(system: System, tokenizer: Any) -> None:
    """For the same request, the fake's events have no key or type that the real engine's events lack, and as
    many output tokens in all."""
    ids = tokenizer.encode("hello there").ids
    fake = FakeEngine(tokenizer, version=str(system.serving()))
    asked: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [
        {
            "rid": f"shape-{interval}-{tops}",
            "input_ids": ids,
            "sampling_params": asked | {"stream_interval": interval},
            "return_logprob": True,
            "top_logprobs_num": tops,
            "stream": True,
        }
        for interval in (1, 5)
        for tops in (0, 2)
    ]
    with serving(fake.app()) as fake_url:
        for body in bodies:
            fake.script.append(list(range(100, 140)))
            said, real = events_of(fake_url, body), events_of(system.engine_url, body)
            assert shape(said[0]) <= shape(real[0])
            assert shape(said[-1]) <= shape(real[-1])
            for events in (said, real):
                assert sum(len(event["output_ids"]) for event in events) == 12
                assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_the_fake_engine_gives_up_as_the_real_one(system: System, tokenizer: Any) -> None:
    body = {
        "rid": "given-up",
        "input_ids": tokenizer.encode("hello there").ids,
        "sampling_params": {"max_new_tokens": 3500, "stream_interval": 1, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 0,
        "stream": True,
    }
    fake = FakeEngine(tokenizer, mind=list(range(100, 140)), version=str(system.serving()))
    fake.interruptions.append(Interruption(3, "abort"))
    with serving(fake.app()) as fake_url:
        said = events_of(fake_url, body)
    real = events_of(system.engine_url, body, abort=True)
    assert shape(said[-1]) <= shape(real[-1])
    for last in (said[-1], real[-1]):
        reason = last["meta_info"]["finish_reason"]
        assert (reason["type"], set(reason)) == ("abort", {"type", "message", "status_code", "err_type"})
        assert last["meta_info"]["weight_versions"][-1]["end"] == last["meta_info"]["completion_tokens"]


def events_of(url: str, body: dict[str, Any], *, abort: bool = False) -> list[dict[str, Any]]:
    """The streamed events; with `abort`, the engine is told to stop after the first event."""
    events: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=300) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                if abort and not events:
                    httpx.post(f"{url}/abort_request", json={"rid": body["rid"]}, timeout=300)
                events.append(json.loads(line[6:]))
    return events


def shape(event: dict[str, Any]) -> set[str]:
    """The names and types of an event's fields, without fields of `meta_info` that are null."""
    top = {f"{name}:{type(value).__name__}" for name, value in event.items()}
    meta = event["meta_info"].items()
    return top | {f"meta_info.{name}:{type(value).__name__}" for name, value in meta if value is not None}
