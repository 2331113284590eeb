"""`/inference/v1/generate` over HTTP: token ids in, token ids out, with vLLM's sampling parameters."""

import math
from typing import Any

import pytest

from tests.support.gateway.fake_engine import Interruption, logprob_of
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.tiny_model import VOCABULARY

PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7]
TRAIN_CLIENT = {"stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False}
"""What the `train` client of verifiers always sends."""


def generate(
    gateway: RunningGateway, ids: list[int] = PROMPT, session: str | None = None, **sampling: Any
) -> Any:
    headers = {"x-session-id": session} if session else {}
    body = {"model": "policy", "token_ids": ids, "sampling_params": TRAIN_CLIENT | sampling}
    return gateway.post(PATH, body, headers=headers)


def test_an_answer_is_what_the_engine_sampled_and_what_is_recorded(gateway: RunningGateway) -> None:
    reply = generate(gateway, session="trace-1")
    body = reply.json()
    (choice,) = body["choices"]
    (turn,) = gateway.turns({"session_id": "trace-1"})
    end = gateway.engine.tokenizer.encode("<|im_end|>").ids
    assert choice["token_ids"] == turn["output_ids"] == [*gateway.engine.tokenizer.encode("hello").ids, *end]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{each}" for each in choice["token_ids"]]
    assert [entry["logprob"] for entry in entries] == [logprob_of(index) for index in range(len(entries))]
    assert all(math.isfinite(entry["logprob"]) for entry in entries)
    assert turn["logprobs"] == pytest.approx([entry["logprob"] for entry in entries])
    assert (choice["finish_reason"], turn["context_ids"]) == ("stop", PROMPT)
    assert body["request_id"] == turn["completion_id"]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert (choice["turn_id"], choice["versions"]) == (turn["turn_id"], turn["versions"])
    assert reply.headers["x-weir-session-id"] == "trace-1"
    assert reply.headers["x-weir-turn-id"] == turn["turn_id"]
    assert "routed_experts" not in choice
    assert "prompt_token_ids" not in body


def test_a_second_turn_extends_the_first_by_its_ids_and_each_token_is_recorded_once(
    gateway: RunningGateway,
) -> None:
    first = generate(gateway, session="trace").json()["choices"][0]["token_ids"]
    generate(gateway, [*PROMPT, *first, 8, 9], session="trace", routed_experts_prompt_start=5)
    one, two = gateway.turns({"session_id": "trace"})
    assert (one["relation"], two["relation"]) == ("root", "extends")
    assert (two["parent_id"], two["context_ids"]) == (one["turn_id"], [8, 9])
    assert gateway.engine.requests[-1]["input_ids"] == [*PROMPT, *first, 8, 9]
    generate(gateway, [*PROMPT, first[0] + 1, 8], session="trace")
    three = gateway.turns({"session_id": "trace"})[-1]
    assert (three["relation"], three["reason"], three["parent_id"]) == ("forks", "new_conversation", None)


def test_several_answers_to_one_prompt_are_several_turns(gateway: RunningGateway) -> None:
    gateway.engine.script += [[300, 302, 303], [301, 302, 303]]
    choices = generate(gateway, session="trace", n=2, max_tokens=2).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert sorted(choice["token_ids"] for choice in choices) == [[300, 302], [301, 302]]
    assert {choice["finish_reason"] for choice in choices} == {"length"}, "they are cut short"
    turns = {turn["turn_id"] for turn in gateway.turns({"session_id": "trace"})}
    assert turns == {choice["turn_id"] for choice in choices}


def test_an_answer_continues_on_another_engine(gateway: RunningGateway) -> None:
    answer = list(range(300, 370))
    gateway.engine.script += [answer, answer]
    gateway.engine.interruptions += [Interruption(64, "abort"), None]
    session = gateway.session(train=False)
    parameters = {"min_tokens": 70, "max_tokens": 90}
    body = {"token_ids": PROMPT, "sampling_params": parameters, "cache_salt": "s"}
    (choice,) = gateway.post(f"/sessions/{session['session_id']}{PATH}", body).json()["choices"]
    assert choice["token_ids"][:70] == answer
    one, two = gateway.engine.requests
    had = len(two["input_ids"]) - len(PROMPT)
    assert had > 0
    asked = [each["sampling_params"] for each in (one, two)]
    assert [each["min_new_tokens"] for each in asked] == [70, 70 - had]
    assert [each["max_new_tokens"] for each in asked] == [90, 90 - had]
    assert [each["cache_salt"] for each in (one, two)] == ["s", "s"]


REACHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"top_k": 4}, {"top_k": 4}),
    ({"top_k": 0}, {"top_k": -1}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"presence_penalty": 0.3}, {"presence_penalty": 0.3}),
    ({"frequency_penalty": 0.3}, {"frequency_penalty": 0.3}),
    ({"logit_bias": {"7": 1.0}}, {"logit_bias": {"7": 1.0}}),
    ({"seed": 11}, {"sampling_seed": 11}),
    ({"max_tokens": 3}, {"max_new_tokens": 3}),
    ({"max_tokens": 5, "min_tokens": 5}, {"min_new_tokens": 5}),
    ({"stop": "END"}, {"stop": ["END"]}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"ignore_eos": True, "stop_token_ids": []}, {"ignore_eos": True, "stop_token_ids": []}),
]


def test_a_parameter_reaches_the_engine_under_its_name_there(gateway: RunningGateway) -> None:
    gateway.session(session_id="judge", train=False)
    for sent, at_engine in REACHES:
        assert generate(gateway, session="judge", **sent).status_code == 200, sent
        assert at_engine.items() <= gateway.engine.requests[-1]["sampling_params"].items(), sent


def test_stop_tokens_are_those_of_the_model_and_of_the_call(gateway: RunningGateway) -> None:
    gateway.engine.script.append([300])
    generate(gateway, session="trace", stop_token_ids=[77, 77])
    sent = gateway.engine.requests[-1]["sampling_params"]["stop_token_ids"]
    assert sent.count(77) == 1
    assert set(gateway.engine.tokenizer.encode("<|im_end|>").ids) < set(sent)


def test_a_trained_session_samples_as_its_policy_says_and_the_reply_tells(gateway: RunningGateway) -> None:
    reply = generate(gateway, session="trace", temperature=0.3, top_k=5, seed=-1, min_tokens=2)
    sent = gateway.engine.requests[-1]["sampling_params"]
    assert (sent["temperature"], sent["top_k"]) == (0.3, -1)
    assert "min_new_tokens" not in sent
    assert "sampling_seed" not in sent
    assert '"temperature":0.3' in reply.headers["x-weir-sampling-asked"]
    assert '"temperature":0.3' in reply.headers["x-weir-sampling"]
    assert '"why":"top_k 5, min_tokens 2: ' in reply.headers["x-weir-sampling"]


def test_an_answer_that_had_to_be_long_is_not_trained(gateway: RunningGateway) -> None:
    gateway.session(session_id="free", sampling={"mode": "allow"})
    generate(gateway, session="free", min_tokens=2)
    generate(gateway, session="free", ids=[9])
    verdicts = [turn["verdict"]["code"] for turn in gateway.turns({"session_id": "free"})]
    assert verdicts == ["not_for_training", "open"]


NEUTRAL: list[dict[str, Any]] = [
    {"logprobs": None},
    {"logprobs": 0},
    {"prompt_logprobs": None, "bad_words": [], "structured_outputs": None, "allowed_token_ids": None},
    {"truncate_prompt_tokens": -1, "extra_args": {}, "min_tokens": 0, "ignore_eos": False},
    {"detokenize": False, "spaces_between_special_tokens": True, "skip_special_tokens": True},
    {"include_stop_str_in_output": True, "stop": [], "return_routed_experts": False},
    {"routed_experts_prompt_start": 2, "max_tokens": None, "temperature": None, "n": None},
]


def test_a_value_that_asks_for_nothing_is_accepted(gateway: RunningGateway) -> None:
    for change in NEUTRAL:
        reply = generate(gateway, **change)
        assert reply.status_code == 200, (change, reply.text)
        assert reply.json()["choices"][0]["logprobs"]["content"], change
    body = {"token_ids": PROMPT, "return_token_ids": True, "priority": 0, "features": None}
    body |= {"content_parts": [], "stream": False, "cache_salt": None}
    assert gateway.post(PATH, body).json()["prompt_token_ids"] == PROMPT
    assert "cache_salt" not in gateway.engine.requests[-1]


def test_a_prompt_that_is_missing_or_too_long_has_its_code(gateway: RunningGateway) -> None:
    reply = gateway.post(PATH, {"sampling_params": {}})
    assert (reply.status_code, "token_ids" in reply.json()["error"]["message"]) == (400, True)
    too_long = gateway.post(PATH, {"token_ids": [5] * 100_000}).json()["error"]
    assert too_long["code"] == "context_length_exceeded"
    outside = gateway.post(PATH, {"token_ids": [VOCABULARY]}).json()["error"]
    assert outside["code"] == "token_out_of_vocabulary"


def test_models_say_how_long_a_prompt_with_its_answer_may_be(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(context_length=64) as gateway:
        listed = gateway.get("/v1/models").json()["data"]
        assert [(each["id"], each["max_model_len"]) for each in listed] == [("policy", 64)]
        assert gateway.get("/v1/models/policy").json()["max_model_len"] == 64
        assert gateway.post(PATH, {"token_ids": [5] * 63}).status_code == 200
        assert gateway.post(PATH, {"token_ids": [5] * 64}).status_code == 400
