"""Which sampling parameters are used: those of the deployment, the session, or the call."""

import json
from typing import Any

import pytest

from gateway.settings.service import GatewaySettings, SamplingSettings
from tests.support.gateway.running import Backends, RunningGateway

HARNESS: dict[str, Any] = {
    "temperature": 0.2,
    "top_p": 0.5,
    "top_k": 5,
    "frequency_penalty": 1.5,
    "presence_penalty": 0.5,
    "logit_bias": {"100": -5},
}
"""Sampling parameters that an agent's framework sets in its code."""
EXACT = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def sent(gateway: RunningGateway) -> dict[str, Any]:
    """The sampling parameters of the engine's last request."""
    parameters: dict[str, Any] = gateway.engine.requests[-1]["sampling_params"]
    return parameters


def test_training_traffic_is_sampled_from_the_policy_itself(gateway: RunningGateway) -> None:
    reply = gateway.chat(**HARNESS)
    assert sent(gateway).items() >= EXACT.items()
    assert not {"frequency_penalty", "presence_penalty", "logit_bias"} & sent(gateway).keys()
    (turn,) = gateway.turns_of(reply)
    assert turn["sampling"]["asked"].items() >= HARNESS.items()
    assert turn["sampling"]["used"].items() >= EXACT.items()
    assert json.loads(reply.headers["x-weir-sampling"]) == turn["sampling"]["used"]
    assert json.loads(reply.headers["x-weir-sampling-asked"]) == turn["sampling"]["asked"]


def test_all_five_parameters_are_always_sent(gateway: RunningGateway) -> None:
    for mode in ("enforce", "default", "allow"):
        gateway.chat(session=gateway.session(sampling={"mode": mode}))
        assert EXACT.keys() <= sent(gateway).keys(), mode


def test_default_fills_in_what_a_call_leaves_out_and_keeps_penalties_away(gateway: RunningGateway) -> None:
    session = gateway.session(sampling={"mode": "default", "temperature": 0.7, "top_p": 0.9})
    gateway.chat(session=session)
    assert (sent(gateway)["temperature"], sent(gateway)["top_p"]) == (0.7, 0.9)
    gateway.chat(session=session, **HARNESS)
    assert (sent(gateway)["temperature"], sent(gateway)["top_p"], sent(gateway)["top_k"]) == (0.2, 0.5, 5)
    assert "frequency_penalty" not in sent(gateway)


def test_a_call_decides_for_itself_where_it_may(gateway: RunningGateway) -> None:
    bodies: list[dict[str, Any]] = [{"sampling": {"mode": "allow"}}, {"train": False}]
    for body in bodies:
        session = gateway.session(**body)
        assert gateway.chat(session=session, **HARNESS).status_code == 200
        assert sent(gateway).items() >= HARNESS.items(), body
        (turn,) = gateway.turns(session)
        assert turn["sampling"]["asked"] == HARNESS, body


def test_a_deployment_sets_the_parameters_of_sessions_that_set_none(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(sampling={"mode": "default", "temperature": 0.6}) as gateway:
        gateway.chat()
        assert sent(gateway)["temperature"] == 0.6
        session = gateway.session(sampling={"mode": "enforce", "temperature": 0.9})
        gateway.chat(session=session, **HARNESS)
        assert sent(gateway)["temperature"] == 0.9


def test_what_only_other_servers_take_reaches_the_engine_in_its_own_words(gateway: RunningGateway) -> None:
    session = gateway.session(train=False)
    greedy = {"top_p": 1.0, "top_k": 1}
    for asked, used in (
        ({"top_k": 0}, {"top_k": -1, "top_p": 1.0}),
        ({"top_p": 0}, greedy),
        ({"top_p": 0, "top_k": 0}, greedy),
        ({"top_p": 0, "top_k": 7, "temperature": 0.5}, greedy | {"temperature": 0.5}),
        ({"temperature": 1e-7}, {"temperature": 0}),
    ):
        for path, body in (
            ("chat/completions", {"messages": [SAID], **asked}),
            ("completions", {"prompt": "hi", **asked}),
            ("messages", {"messages": [SAID], "max_tokens": 9, **asked}),
        ):
            reply = gateway.post(f"/sessions/{session['session_id']}/v1/{path}", body)
            assert reply.status_code == 200, (asked, reply.text)
            assert sent(gateway).items() >= used.items(), (asked, path)
            turn = gateway.turns(session)[-1]
            assert turn["sampling"]["asked"].items() >= asked.items()
            assert turn["sampling"]["used"].items() >= used.items()
    ids = {"token_ids": [5], "sampling_params": {"top_k": 0, "top_p": 0}}
    assert gateway.post(f"/sessions/{session['session_id']}/inference/v1/generate", ids).status_code == 200
    assert sent(gateway).items() >= greedy.items()
    refused = gateway.chat(session=session, repetition_penalty=0)
    assert refused.json()["error"]["param"] == "repetition_penalty"


SAID: Any = {"role": "user", "content": "hi"}
INEXACT: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0.5, "top_k": 5}, "top_p 0.5, top_k 5"),
    ({"min_p": 0.1}, "min_p 0.1"),
    ({"repetition_penalty": 1.2, "frequency_penalty": 0.5}, "repetition_penalty 1.2, frequency_penalty 0.5"),
    ({"logit_bias": {"100": -5}}, "logit_bias"),
    ({"temperature": 0}, "temperature 0"),
    ({"temperature": 1e-9}, "temperature 0"),
    ({"top_p": 0}, "top_k 1"),
]


def test_a_turn_whose_logprobs_are_of_another_distribution_is_not_trained(gateway: RunningGateway) -> None:
    session = gateway.session(sampling={"mode": "allow"})
    gateway.chat("the first", session=session, temperature=0.5, top_p=1.0)
    for asked, _ in INEXACT:
        gateway.chat(f"another with {asked}", session=session, **asked)
    first, *others = [turn["verdict"] for turn in gateway.turns(session)]
    assert first["code"] == "open"
    for verdict, (asked, named) in zip(others, INEXACT, strict=True):
        assert verdict["code"] == "not_for_training", asked
        assert verdict["detail"].startswith(f"sampled with {named}: "), asked


def test_a_gateway_whose_defaults_keep_every_turn_from_training_does_not_start(backends: Backends) -> None:
    for defaults in (SamplingSettings(top_p=0.9), SamplingSettings(temperature=0)):
        with pytest.raises(ValueError, match="unless train_inexact is true"):
            GatewaySettings(model_path=backends.model_path, sampling=defaults)


def test_a_deployment_may_train_such_turns(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(sampling={"mode": "default"}, train_inexact=True) as gateway:
        reply = gateway.chat(top_p=0.5)
        (turn,) = gateway.turns_of(reply)
        assert (sent(gateway)["top_p"], turn["verdict"]["code"]) == (0.5, "open")


def test_a_harness_with_a_fixed_seed_does_not_make_a_group_sample_one_answer(gateway: RunningGateway) -> None:
    reply = gateway.chat(seed=41)
    assert "sampling_seed" not in sent(gateway)
    (turn,) = gateway.turns_of(reply)
    assert (turn["sampling"]["asked"]["seed"], "seed" in turn["sampling"]["used"]) == (41, False)


def test_every_choice_has_a_seed_of_its_own(gateway: RunningGateway) -> None:
    gateway.chat(session=gateway.session(train=False), n=3, seed=41)
    seeds = [request["sampling_params"]["sampling_seed"] for request in gateway.engine.requests]
    assert sorted(seeds) == [41, 42, 43]


def test_an_answer_may_use_what_the_context_leaves(gateway: RunningGateway) -> None:
    reply = gateway.chat()
    (turn,) = gateway.turns_of(reply)
    assert sent(gateway)["max_new_tokens"] == 4096 - turn["context_len"]
    gateway.chat(max_tokens=7)
    assert sent(gateway)["max_new_tokens"] == 7
    gateway.chat(max_completion_tokens=5, max_tokens=7)
    assert sent(gateway)["max_new_tokens"] == 5
    session = gateway.session(sampling={"max_tokens": 3})
    gateway.chat(session=session, max_tokens=7)
    assert sent(gateway)["max_new_tokens"] == 3
