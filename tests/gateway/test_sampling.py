"""Who owns the sampling parameters: the deployment, the session, or the call."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import Door, Stage

HARNESS: dict[str, Any] = {
    "temperature": 0.2,
    "top_p": 0.5,
    "top_k": 5,
    "frequency_penalty": 1.5,
    "presence_penalty": 0.5,
    "logit_bias": {"100": -5},
}
"""What a harness hard-codes."""
EXACT = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def sent(door: Door) -> dict[str, Any]:
    """What the engine was told last."""
    parameters: dict[str, Any] = door.engine.requests[-1]["sampling_params"]
    return parameters


def test_training_traffic_is_sampled_from_the_policy_itself(door: Door) -> None:
    reply = door.chat(**HARNESS)
    assert sent(door).items() >= EXACT.items()
    assert not {"frequency_penalty", "presence_penalty", "logit_bias"} & sent(door).keys()
    (turn,) = door.turns({"session_id": reply.headers["x-weir-session-id"]})
    assert turn["sampling"]["asked"].items() >= HARNESS.items()
    assert turn["sampling"]["used"].items() >= EXACT.items()
    assert json.loads(reply.headers["x-weir-sampling"]) == turn["sampling"]["used"]
    assert json.loads(reply.headers["x-weir-sampling-asked"]) == turn["sampling"]["asked"]


def test_all_five_parameters_are_always_sent(door: Door) -> None:
    for mode in ("enforce", "default", "allow"):
        session = door.session(sampling={"mode": mode})
        door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
        assert EXACT.keys() <= sent(door).keys()


def test_default_fills_in_what_a_call_leaves_out_and_keeps_penalties_away(door: Door) -> None:
    session = door.session(sampling={"mode": "default", "temperature": 0.7, "top_p": 0.9})
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    door.chat(path=path)
    assert (sent(door)["temperature"], sent(door)["top_p"]) == (0.7, 0.9)
    door.chat(path=path, **HARNESS)
    assert (sent(door)["temperature"], sent(door)["top_p"], sent(door)["top_k"]) == (0.2, 0.5, 5)
    assert "frequency_penalty" not in sent(door)


@pytest.mark.parametrize("body", [{"sampling": {"mode": "allow"}}, {"train": False}])
def test_a_call_decides_for_itself_where_it_may(door: Door, body: dict[str, Any]) -> None:
    session = door.session(**body)
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    assert door.chat(path=path, **HARNESS).status_code == 200
    for name, value in HARNESS.items():
        assert sent(door)[name] == value, name


def test_a_deployment_says_what_sessions_that_are_silent_get(stage: Stage) -> None:
    stage.clear(None)
    with stage.door(sampling={"mode": "default", "temperature": 0.6}) as door:
        door.chat()
        assert sent(door)["temperature"] == 0.6
        session = door.session(sampling={"mode": "enforce", "temperature": 0.9})
        door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", **HARNESS)
        assert sent(door)["temperature"] == 0.9


def test_every_choice_has_a_seed_of_its_own(door: Door) -> None:
    door.chat(n=3, seed=41)
    assert sorted(request["sampling_params"]["sampling_seed"] for request in door.engine.requests) == [
        41,
        42,
        43,
    ]


def test_an_answer_may_use_what_the_context_leaves(door: Door) -> None:
    reply = door.chat()
    (turn,) = door.turns({"session_id": reply.headers["x-weir-session-id"]})
    assert sent(door)["max_new_tokens"] == 4096 - turn["context_len"]
    door.chat(max_tokens=7)
    assert sent(door)["max_new_tokens"] == 7
    door.chat(max_completion_tokens=5, max_tokens=7)
    assert sent(door)["max_new_tokens"] == 5
    session = door.session(sampling={"max_tokens": 3})
    door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", max_tokens=7)
    assert sent(door)["max_new_tokens"] == 3
