"""Samples over the Tinker API are recorded as turns and made once; recorded turns are the data of a loop."""

import asyncio
import json
import math
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from gateway.rest.bodies import PROTOBUF
from gateway.tinker import messages_pb2 as wire
from gateway.tinker.paths import PromiseId
from gateway.tinker.promises import CANCELLED, LEASE_S, SamplePromises
from rollout_queue.redis import key_names
from tests.support.gateway.fake_engine import Interruption
from tests.support.gateway.gated_engine import let_on
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.gateway.tinker_loop import SamplingLoop, sampled
from tests.support.redis_clients import async_redis_at
from tests.support.waiting import wait_until
from weir.tinker import RecordedRow, group_advantages, recorded, token_inputs


@pytest.fixture
def loop(gateway: RunningGateway, backends: Backends) -> SamplingLoop:
    return SamplingLoop(gateway, str(backends.model_path)).start()


def test_samples_are_what_the_engine_sampled(loop: SamplingLoop, gateway: RunningGateway) -> None:
    gateway.engine.script.extend([[5, 6], [7, 8]])
    promise = loop.ask(0, [1, 2, 3], num_samples=2).json()
    made = sampled(loop.poll(promise))
    end = gateway.engine.tokenizer.encode(gateway.engine.end).ids
    assert sorted(list(array("i", each.tokens)) for each in made.sequences) == [[5, 6, *end], [7, 8, *end]]
    assert [each.stop_reason for each in made.sequences] == [wire.STOP_REASON_STOP] * 2
    for sequence_id, sequence in zip(promise["sample_sequence_ids"], made.sequences, strict=True):
        told = loop.get(f"sequences/{sequence_id}").json()
        assert (told["versions"], told["tokens"]) == ([[0, 0, 3]], 3)
        view = gateway.get(f"/sessions/{told['session_id']}?tokens=true").json()
        (turn,) = [each for each in view["turns"] if each["turn_id"] == told["turn_id"]]
        assert turn["output_ids"] == list(array("i", sequence.tokens))
        assert turn["logprobs"] == pytest.approx(list(array("f", sequence.logprobs)))
        assert (view["state"], view["verdict"]["code"]) == ("finished", "not_for_training"), view
    assert loop.get(f"sequences/{promise['sample_sequence_ids'][0]}9").status_code == 404


def test_a_sample_that_is_asked_for_again_is_made_once(loop: SamplingLoop, gateway: RunningGateway) -> None:
    again = [loop.ask(3, [1, 2]).json() for _ in range(3)]
    assert all(each == again[0] for each in again)
    sampled(loop.poll(again[0]))
    assert loop.ask(3, [1, 2]).json() == again[0]
    assert len(gateway.engine.requests) == 1
    other = loop.ask(3, [1, 2, 3])
    assert (other.status_code, other.json()["error"]["code"]) == (400, "sequence_conflict")
    gateway.redis.delete(key_names.result(again[0]["request_id"]))  # its gateway died, and nobody renewed it
    assert loop.poll(again[0]).status_code == 410
    sampled(loop.poll(loop.ask(3, [1, 2]).json()))


@pytest.mark.parametrize(
    ("stop", "sent"),
    [
        (None, {}),
        ([], {"ignore_eos": True, "stop_token_ids": []}),
        ("x", {"stop": ["x"]}),
        (["x", "y"], {"stop": ["x", "y"]}),
        ([7, 9], {"stop_token_ids": [7, 9]}),
    ],
    ids=repr,
)
def test_what_ends_a_sample(
    loop: SamplingLoop, gateway: RunningGateway, stop: Any, sent: dict[str, Any]
) -> None:
    loop.sample(0, [1, 2], {"stop": stop, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3})
    parameters = gateway.engine.requests[-1]["sampling_params"]
    ends = parameters["stop_token_ids"]
    if stop == [7, 9]:
        assert set(ends) > {7, 9}, "those of the model, too"
        parameters["stop_token_ids"] = [7, 9]
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "sampling_seed": 3, "max_new_tokens": 8} | sent
    assert {name: parameters[name] for name in expected} == expected
    assert ("stop" in parameters) == ("stop" in sent)


def test_a_prompt_is_scored_and_the_likeliest_tokens_of_a_sample_are_told(
    loop: SamplingLoop, gateway: RunningGateway
) -> None:
    made = loop.sample(0, [4, 5, 6], {"max_tokens": 1}, prompt_logprobs=True, topk_prompt_logprobs=2)
    scores = list(array("f", made.prompt_logprobs))
    assert math.isnan(scores[0])
    assert scores[1:] == pytest.approx([-0.005, -0.006])
    top = made.topk_prompt_logprobs
    assert (top.k, top.length) == (2, 3)
    assert list(array("i", top.token_ids)) == [0, 0, 0, 1, 0, 1]
    assert list(array("f", top.logprobs)) == [-99999.0, -99999.0, -0.5, -1.5, -0.5, -1.5]
    last = loop.sample(1, [4, 5, 6, 7], prompt_logprobs=True, prompt_logprobs_last_n=2)
    scores = list(array("f", last.prompt_logprobs))
    assert [math.isnan(each) for each in scores] == [True, True, False, False]
    assert scores[2:] == pytest.approx([-0.006, -0.007])
    assert [each["logprob_start_len"] for each in gateway.engine.requests if not each["stream"]] == [0, 1]
    made = loop.sample(2, [1, 2], topk_sample_logprobs=3)
    top = made.sequences[0].topk_sampled_logprobs
    assert (top.k, top.length) == (3, len(array("i", made.sequences[0].tokens)))
    assert len(array("f", top.logprobs)) == top.k * top.length


def test_scores_of_other_tokens_in_the_places_of_the_prompt(
    loop: SamplingLoop, gateway: RunningGateway
) -> None:
    dense = {"data": [-1, -1, 9, -1, 30, 9], "dtype": "int64", "shape": [3, 2]}
    made = loop.sample(0, [4, 5, 6, 7], target_prompt_logprobs=dense)
    assert not made.HasField("prompt_logprobs")
    tensor = made.target_prompt_logprobs
    assert (list(tensor.shape), tensor.dtype) == ([3, 2], wire.DTYPE_FLOAT32)
    assert list(array("f", tensor.dense)) == pytest.approx([0, 0, -0.009, 0, -0.03, -0.009])
    sparse: dict[str, Any] = {"data": [30, 9], "dtype": "int64", "shape": [3, 1000]}
    sparse |= {"sparse_crow_indices": [0, 0, 1, 2], "sparse_col_indices": [999, 0]}
    both = {"target_prompt_logprobs": sparse, "prompt_logprobs": True, "prompt_logprobs_last_n": 1}
    made = loop.sample(1, [4, 5, 6, 7], **both)
    assert [math.isnan(each) for each in array("f", made.prompt_logprobs)] == [True, True, True, False]
    csr = made.target_prompt_logprobs.sparse_csr
    assert list(array("f", csr.values)) == pytest.approx([-0.03, -0.009])
    assert (list(array("q", csr.crow_indices)), list(array("q", csr.col_indices))) == ([0, 0, 1, 2], [999, 0])
    asked = [each for each in gateway.engine.requests if not each["stream"]]
    told = [(each["logprob_start_len"], each["token_ids_logprob"]) for each in asked]
    assert told == [(1, [9, 30])] * 2
    many = {"data": list(range(100)) * 299, "dtype": "int64", "shape": [299, 100]}
    made = loop.sample(2, [1] * 300, target_prompt_logprobs=many)  # so many are read beside the other calls
    scores = [-token / 1000 for token in range(100)] * 299
    assert list(array("f", made.target_prompt_logprobs.dense)) == pytest.approx(scores)


def test_more_scores_than_the_gateway_reads_are_refused(loop: SamplingLoop) -> None:
    for k, what in ((150, "599800 scores"), (200, "599800 cells")):
        wanted: dict[str, Any] = {"data": [(at + row) % 200 for row in range(2999) for at in range(k)]}
        wanted |= {"dtype": "int64", "shape": [2999, k]}
        refused = loop.ask(0, [1] * 3000, target_prompt_logprobs=wanted)
        assert refused.status_code == 400
        assert f"{what}, of 524288 allowed" in refused.json()["error"]["message"]


def test_faults_of_engines_are_not_the_clients_and_a_refusal_says_why(
    loop: SamplingLoop, gateway: RunningGateway
) -> None:
    gateway.engine.interruptions.append(Interruption(1, "reset"))
    assert len(loop.sample(0, [1, 2]).sequences) == 1
    gateway.engine.refusals.extend([PlainTextResponse("busy", 503), None, None])
    made = loop.sample(1, [1, 2], prompt_logprobs=True)
    assert len(array("f", made.prompt_logprobs)) == 2
    refused = {"error": {"message": "no such thing", "type": "BadRequestError", "code": 400}}
    gateway.engine.refusals.extend([PlainTextResponse(json.dumps(refused), 400)] * 4)
    told = loop.poll(loop.ask(2, [1, 2]).json()).json()
    assert (told["category"], "no such thing" in told["error"]) == ("user", True)


def test_a_sample_waits_for_engines(backends: Backends, gateway: RunningGateway) -> None:
    with backends.gateway(engine_wait_s=0.1, failover_patience_s=0.1) as patient:
        loop = SamplingLoop(patient, str(backends.model_path)).start()
        patient.engine.refusals.extend([PlainTextResponse("gone", 503)] * 4)
        promise = loop.ask(0, [1, 2]).json()
        made = sampled(loop.poll(promise))
        assert len(made.sequences) == 1
        assert loop.get(f"sequences/{promise['sample_sequence_ids'][0]}").json()["tokens"] > 0


def test_an_engine_that_stays_away_or_scores_other_tokens_fails_the_sample(
    backends: Backends, gateway: RunningGateway
) -> None:
    settings: Any = {"tinker": {"sample_patience_s": 0.0}, "engine_wait_s": 0.1, "failover_patience_s": 0.1}
    with backends.ready_gateway(**settings) as impatient:
        loop = SamplingLoop(impatient, str(backends.model_path)).start()
        impatient.engine.candidates_off_by = 1
        wanted = {"data": [3], "dtype": "int64", "shape": [1, 1]}
        told = loop.poll(loop.ask(0, [1, 2], target_prompt_logprobs=wanted).json()).json()
        assert (told["category"], "other tokens than the candidates" in told["error"]) == ("server", True)
        impatient.engine.refusals.extend([PlainTextResponse("gone", 503)] * 50)
        assert loop.poll(loop.ask(1, [1, 2]).json()).json()["category"] == "server"


NOT_SERVED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": {"chunks": []}}, "prompt"),
    ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [99999]}]}}, "prompt"),
    ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt"),
    ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1.5]}]}}, "prompt"),
    ({"target_prompt_logprobs": {"data": []}}, "target_prompt_logprobs"),
    *(
        ({"target_prompt_logprobs": {"dtype": "int64"} | wanted}, "target_prompt_logprobs")
        for wanted in (
            {"data": [3, 4], "shape": [2]},
            {"data": [3, 4], "shape": [2, 1]},
            {"data": [3], "shape": [1, 2]},
            {"data": [-1], "shape": [1, 1]},
            {"data": [99999], "shape": [1, 1]},
            {"data": [-2], "shape": [1, 1]},
            {"data": [3], "shape": [1, 1], "dtype": "float32"},
            {"data": [3], "shape": [1, 1], "sparse_crow_indices": [0, 1]},
            {"data": [3], "shape": [1, 1], "sparse_crow_indices": [0, 1], "sparse_col_indices": [1]},
            {"data": [3], "shape": [1, 1], "sparse_crow_indices": [0, 2], "sparse_col_indices": [0]},
        )
    ),
    ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
    ({"topk_prompt_logprobs": 2}, "topk_prompt_logprobs"),
    ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
    ({"num_samples": 0}, "num_samples"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params"),
    ({"sampling_params": {"colour": 1}}, "sampling_params"),
    ({"base_model": "x"}, "base_model"),
    ({"colour": "red"}, "colour"),
]


def test_what_is_not_served_is_refused_by_name(loop: SamplingLoop) -> None:
    for body, param in NOT_SERVED:
        refused = loop.ask(0, [1, 2], **body)
        assert refused.status_code == 400, body
        assert refused.json()["error"]["param"].startswith(param), body


def test_another_key_neither_samples_nor_reads(loop: SamplingLoop) -> None:
    promise = loop.ask(0, [1, 2]).json()
    other = loop.of_another_key()
    assert other.ask(1, [1, 2]).status_code == 404
    assert other.poll(promise).status_code == 404
    for path in (f"samplers/{loop.sampler}", f"sequences/{promise['sample_sequence_ids'][0]}"):
        assert other.get(path).status_code == 404
    told = loop.get(f"samplers/{loop.sampler}").json()
    assert told == {"sampler_id": loop.sampler, "base_model": loop.base_model, "model_path": None}


def test_more_samples_than_a_gateway_makes_are_refused(backends: Backends, gated: RunningGateway) -> None:
    with backends.gateway(tinker={"max_samples": 2, "poll_s": 0.05}, engine_timeout_s=30) as small:
        loop = SamplingLoop(small, str(backends.model_path)).start()
        backends.engine = small.engine = gated.engine
        first = loop.ask(0, [1, 2], {"max_tokens": 100})
        assert first.status_code == 200
        wait_until(lambda: len(gated.engine.requests) == 1)
        assert loop.poll(first.json()).json()["queue_state"] == "active"
        refused = loop.ask(1, [1, 2])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "samples_limit")
        again = loop.ask(0, [1, 2], {"max_tokens": 100})
        assert again.json() == first.json(), "it is promised already"
        let_on(gated)
        assert small.refusals == {"samples_limit": 1}
        wait_until(lambda: loop.poll(first.json()).headers["content-type"] == PROTOBUF)


def accepted(reply: Any) -> Any:
    """The promise; None while the cancelled sample has not made room."""
    assert reply.status_code in (200, 429), reply.text
    return reply.json() if reply.status_code == 200 else None


def cancel(loop: SamplingLoop, by: SamplingLoop, number: int, gated: RunningGateway) -> None:
    """Ask for a sample; the engine stops in the middle, and another client process cancels it."""
    promise = wait_until(lambda: accepted(loop.ask(number, [1, 2], {"max_tokens": 100})))
    wait_until(lambda: len(gated.engine.requests) == number + 1)
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(loop.poll, promise)  # it is held until somebody tells something
        assert by.post("cancel_future", {"request_id": promise["request_id"]}).json() == {}
        assert poll.result().json() == {"error": "the client has cancelled it", "category": "user"}
    wait_until(lambda: len(gated.engine.aborted) == number + 1)
    again = loop.ask(number, [1, 2], {"max_tokens": 100})
    assert again.json() == promise, "the same request is the same promise"


def test_a_sample_is_cancelled_also_by_another_gateway(backends: Backends, gated: RunningGateway) -> None:
    """Only the cancellation can end them: no engine is given up."""
    given: dict[str, Any] = {"tinker": {"max_samples": 2, "poll_s": 30}}
    given |= {"engine_timeout_s": 600, "scheduler_silence_s": 600}
    with backends.gateway(**given) as maker, backends.gateway(**given) as other:
        loop = SamplingLoop(maker, str(backends.model_path)).start()
        there = SamplingLoop(other, loop.base_model, loop.key, loop.session_id)
        backends.engine = maker.engine = other.engine = gated.engine
        for number, by in enumerate((loop, there)):
            cancel(loop, by, number, gated)
        let_on(gated)
        made = wait_until(lambda: accepted(loop.ask(2, [1, 2])))
        sampled(loop.poll(made))
        loop.post("cancel_future", {"request_id": made["request_id"]})
        sampled(loop.poll(made))


def test_what_the_polls_of_a_promise_were_told_stays(backends: Backends, gateway: RunningGateway) -> None:
    """The sample is made, and its promise renewed, at the moment at which it is cancelled."""
    promise = PromiseId("s", "run-1:sample:0", 0)

    async def cancelled() -> tuple[bool, bytes | None]:
        redis = async_redis_at(backends.redis_url)
        promises = SamplePromises(redis)
        assert await promises.begin(promise, "0" * 32)
        assert await promises.renew(promise)
        await promises.cancel(promise)
        renewed = await promises.renew(promise)
        await promises.keep(promise, b"made")
        told = await promises.result(promise)
        await redis.aclose()
        return renewed, told

    assert asyncio.run(cancelled()) == (False, CANCELLED)
    assert gateway.redis.ttl(key_names.result(str(promise))) > LEASE_S, (
        "a lease would end it, and it would be made"
    )


def test_only_own_samples_are_cancelled(loop: SamplingLoop) -> None:
    promise = loop.ask(0, [1, 2]).json()
    assert (
        loop.of_another_key().post("cancel_future", {"request_id": promise["request_id"]}).status_code == 404
    )
    command = loop.post("cancel_future", {"request_id": f"c:{loop.model_id}:0"})
    assert (command.status_code, "only samples" in command.text) == (400, True)
    assert loop.post("cancel_future", {"request_id": "x"}).status_code == 404
    assert loop.post("cancel_future", {"request_id": f"s:{loop.sampler}:77"}).json() == {}, "it is gone"


# Recorded sessions as the data of a loop: each sampled token at the position that predicts it


def row(session_id: str = "s", group_id: str = "g", reward: float = 1.0) -> RecordedRow:
    return RecordedRow(
        session_id=session_id,
        group_id=group_id,
        task_id=None,
        reward=reward,
        rows=1,
        prompt_P=[1, 2, 3],
        response_R=[4, 5, 6, 7],
        mask_R=[1, 1, 0, 1],
        logprobs_R=[-0.5, -0.25, 0.0, -2.0],
        versions_R=[3, 3, -1, 4],
        turn_ids=["t"],
        cursor="s/t",
    )


def test_each_trained_token_is_the_target_of_the_position_before_it() -> None:
    inputs = token_inputs(row(), 2.0)
    assert inputs.input_N == [1, 2, 3, 4, 5, 6]
    assert inputs.target_N == [2, 3, 4, 5, 6, 7]
    trained = [
        (target, logprob, advantage)
        for target, logprob, advantage in zip(
            inputs.target_N, inputs.logprobs_N, inputs.advantages_N, strict=True
        )
        if advantage
    ]
    assert trained == [(4, -0.5, 2.0), (5, -0.25, 2.0), (7, -2.0, 2.0)]
    assert inputs.mask_N == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]


def test_advantages_are_of_sessions_and_not_of_rows() -> None:
    rows = [row("a", "g", 1.0), row("a", "g", 1.0), row("b", "g", 0.0), row("c", "h", 5.0)]
    assert group_advantages(rows) == {"a": 0.5, "b": -0.5, "c": 0.0}


def test_rows_are_what_the_agents_sampled(gateway: RunningGateway) -> None:
    group = gateway.post("/groups", {"size": 2, "task_id": "sums"}).json()
    gateway.engine.script.extend(["one", "two", "three"])
    for reward, session in enumerate(group["sessions"]):
        for text in ("hi", "again")[: reward + 1]:
            assert gateway.chat(text, session=session).status_code == 200
        gateway.finish(session, reward=float(reward))
    rows = list(recorded(gateway.url, ADMIN_KEY))
    assert {(each.reward, each.task_id, each.group_id) for each in rows} == {
        (0.0, "sums", group["group_id"]),
        (1.0, "sums", group["group_id"]),
    }
    for each in rows:
        turns = gateway.turns({"session_id": each.session_id})
        sampled = [turn for turn in turns if turn["turn_id"] in each.turn_ids]
        ids = [token for turn in sampled for token in turn["output_ids"]]
        assert ids, "each row trains something"
        trained = [token for token, mask in zip(each.response_R, each.mask_R, strict=True) if mask]
        assert trained == ids
        inputs = token_inputs(each, 1.0)
        picked = [
            (target, logprob)
            for target, logprob, mask in zip(inputs.target_N, inputs.logprobs_N, inputs.mask_N, strict=True)
            if mask
        ]
        logprobs = [value for turn in sampled for value in turn["logprobs"]]
        assert [token for token, _ in picked] == ids
        assert [logprob for _, logprob in picked] == pytest.approx(logprobs)
    after = list(recorded(gateway.url, ADMIN_KEY, after=rows[0].cursor))
    assert [each.cursor for each in after] == [each.cursor for each in rows[1:]]
    with pytest.raises(httpx.HTTPStatusError):
        list(recorded(gateway.url, CLIENT_KEY))


def test_rows_of_a_gateway_without_keys_need_none(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(client_keys=[], admin_keys=[]) as gateway:
        for none in ("", None):
            assert list(recorded(gateway.url, none)) == []
