"""`verifiers` plays episodes with its own chat harness: as token ids, which it trains on, and as messages.

Its own program calls the gateway, and `weir env` plays the same environment.
"""

import json
import os
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from environments.settings import RunSettings
from environments.start_run import RunPlace, play_run
from tests.support.clients.stack import CLIENT_KEY, ROOT, RunningStack

CLIENT = "verifiers"
TIMEOUT_S = 400.0
"""The library starts several processes for each rollout, and installs one of them at its first run."""
MODEL = str(ROOT / "run" / "models" / "clients")
ROUTE: dict[str, Any] = {
    name: value for name, value in os.environ.items() if name.startswith(("UV_", "SSL_CERT", "HTTPS_"))
}
"""How this machine reaches the package index: the library installs its harness with `uv` at its first run."""


def test_what_the_library_trains_on_is_what_weir_has_recorded(stack: RunningStack) -> None:
    said = stack.play(CLIENT, "train", timeout_s=TIMEOUT_S, MODEL_DIRECTORY=MODEL, **ROUTE)
    assert all(said["ok"]), [trace["errors"] for trace in said["traces"]]
    recorded = stack.exported()
    assert len({trace["id"] for trace in said["traces"]}) == len(said["traces"]) == len(said["ok"]) > 1
    relations = {each for trace in said["traces"] for each in compared(trace, recorded[trace["id"]])}
    assert relations == {"root", "extends"}


def compared(trace: dict[str, Any], turns: list[dict[str, Any]]) -> set[str]:
    """The relations of the recorded turns, which have to be those of the library's trace."""
    (branch,) = trace["branches"]
    ids, sampled, logprobs = list[int](), list[bool](), list[float]()
    for turn in turns:
        context, output = turn["context_ids"], turn["output_ids"]
        ids += context + output
        sampled += [False] * len(context) + [True] * len(output)
        logprobs += [0.0] * len(context) + turn["logprobs"]
    assert (ids, sampled) == (branch["ids"], branch["sampled"])
    assert array("f", logprobs) == array("f", branch["logprobs"])  # Weir stores float32
    assert any(sampled)
    return {turn["relation"] for turn in turns}


RENDERED = {"renderer": {"name": "qwen3", "thinking_retention": "all"}, "renderer_model_name": MODEL}


@pytest.mark.parametrize("client", ["eval", "train"])
async def test_a_run_has_the_rewards_and_the_groups_of_the_traces(
    stack: RunningStack, tmp_path: Path, client: str
) -> None:
    record = tmp_path / "traces.jsonl"
    options = {"harness": None, "client": client, "taskset": {"record": str(record)}}
    settings = RunSettings(
        environment="verifiers:letters",
        options=options | (RENDERED if client == "train" else {}),
        group_size=2,
        episodes=8,
        concurrency=2,
        max_turns=6,
        sampling={"temperature": 1.0, "max_tokens": 64},
    )
    toys = Path(__file__).with_name("verifiers")
    place = RunPlace(tmp_path / "run", stack.url, CLIENT_KEY, directory=toys)
    summary = await play_run(settings, place, lambda line: None)
    assert sum(summary["by_status"].values()) == 8
    assert "failed" not in summary["by_status"], summary["reasons"]
    traces = {trace["id"]: trace for trace in map(json.loads, record.read_text().splitlines())}
    recorded, groups = stack.exported(), defaultdict(set)
    sessions = [each for each in stack.sessions() if each.session_id in traces]
    assert len(sessions) == len(traces) == 8
    for session in sessions:
        view, trace = session.view(), traces[session.session_id]
        assert view["reward"] == sum(trace["rewards"].values())
        assert set(trace["rewards"]) == {"right"}
        groups[view["group_id"]].add(view["task_id"])
        if client == "train":
            assert compared(trace, recorded[trace["id"]]) <= {"root", "extends"}
    assert [len(tasks) for tasks in groups.values()] == [1, 1, 1, 1]
    assert len(set.union(*groups.values())) == 4


def test_each_trace_of_a_relayed_episode_is_one_session(stack: RunningStack) -> None:
    before = {session.session_id for session in stack.sessions()}
    said = stack.play(CLIENT, "eval", timeout_s=TIMEOUT_S, **ROUTE)
    assert all(said["ok"]), [trace["errors"] for trace in said["traces"]]
    new = {session.session_id for session in stack.sessions()} - before
    assert new == {trace["id"] for trace in said["traces"]}
    recorded = stack.exported()
    relations = {turn["relation"] for trace in said["traces"] for turn in recorded[trace["id"]]}
    assert relations == {"root", "extends"}


def test_the_engine_takes_each_parameter_of_token_ids(stack: RunningStack) -> None:
    session = stack.session(train=False)

    def generate(**sampling: Any) -> dict[str, Any]:
        body = {"token_ids": [5, 6, 7], "sampling_params": sampling, "cache_salt": "mine"}
        path = f"/sessions/{session.session_id}/inference/v1/generate"
        choice: dict[str, Any] = stack.http.post(path, json=body).raise_for_status().json()["choices"][0]
        return choice

    whole = generate(max_tokens=20, ignore_eos=True, temperature=0)
    assert (len(whole["token_ids"]), whole["finish_reason"]) == (20, "length")
    first = whole["token_ids"][0]
    stopped = generate(max_tokens=20, stop_token_ids=[first], temperature=0)
    assert (stopped["token_ids"], stopped["finish_reason"]) == ([first], "stop")
    long = generate(max_tokens=20, min_tokens=12, stop_token_ids=[first], temperature=0)["token_ids"]
    assert len(long) >= 12
    assert first not in long[:12]
    everything: dict[str, Any] = dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.1)
    everything |= {"repetition_penalty": 1.1, "logit_bias": {"9": -1.0}, "temperature": 0.7}
    everything |= {"seed": 5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "stop": ["zzz"]}
    assert generate(max_tokens=5, **everything)["token_ids"]
