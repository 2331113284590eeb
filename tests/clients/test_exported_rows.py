"""verl, TRL and OpenEnv, each in its own environment, read exported rows with their own classes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.clients.stack import ENVIRONMENTS, HERMETIC, told
from tests.support.gateway.exports import export
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.redis_clients import redis_at
from tests.support.serving import serving
from tests.support.waiting import wait_until

REWARDS = {"a0": 1.0, "a1": 0.0, "b0": 0.25, "b1": 1.0}
"""Two groups of two sessions."""
PLAY_TIMEOUT_S = 500.0
"""The first import of these libraries compiles thousands of modules."""


@pytest.fixture(scope="module")
def recorded(redis_url: str, tiny_model: Path, tokenizer: Tokenizer) -> Iterator[RunningGateway]:
    """A gateway with two finished groups. Each session has two calls."""
    backends = Backends(redis_url, tiny_model, tokenizer, redis_at(redis_url), FakeEngine(tokenizer))
    with serving(backends) as backends.engine_url, backends.gateway() as gateway:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        for name, reward in REWARDS.items():
            gateway.session(session_id=name, group_id=name[0], group_size=2)
            messages = [{"role": "user", "content": f"question of {name}"}]
            path = f"/sessions/{name}/v1/chat/completions"
            answer = gateway.post(path, {"messages": messages}).json()["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": "and then?"}]
            assert gateway.post(path, {"messages": messages}).status_code == 200
            gateway.post(f"/sessions/{name}/finish", {"status": "completed", "reward": reward})
        yield gateway
    backends.redis.close()


def played(gateway: RunningGateway, directory: Path, form: str, client: str, *asked: str | Path) -> Any:
    """What the program of a library printed last about the export in this format."""
    file = directory / f"{form}.jsonl"
    file.write_bytes(gateway.get(f"/admin/export?format={form}", key=ADMIN_KEY).content)
    python, program = ENVIRONMENTS / client / "bin" / "python", Path(__file__).parent / client / "play.py"
    own = {"PATH": os.environ["PATH"], "HOME": str(directory), "TRL_EXPERIMENTAL_SILENCE": "1"}
    return told([python, program, file, *asked], HERMETIC | own, PLAY_TIMEOUT_S, directory)


def test_verl_makes_its_batch_and_the_advantages_of_each_group(
    recorded: RunningGateway, tmp_path: Path
) -> None:
    rows = export(recorded, format="verl")
    made = played(recorded, tmp_path, "verl", "verl")
    assert made["session_id"] == list(REWARDS)
    assert made["uid"] == ["a", "a", "b", "b"]
    assert made["min_global_steps"] == [0] * 4
    assert made["rows"] == [1] * 4
    for number, row in enumerate(rows):
        length = len(row["response_ids"])
        assert made["prompts"][number][: len(row["prompt_ids"])] == row["prompt_ids"]
        assert made["responses"][number][:length] == row["response_ids"]
        assert made["response_mask"][number][:length] == row["response_mask"]
        assert made["rollout_log_probs"][number][:length] == pytest.approx(row["response_logprobs"])
        scores = made["rm_scores"][number]
        assert (scores[length - 1], sum(scores)) == (row["reward_score"],) * 2
        advantages = zip(made["advantages"][number], made["response_mask"][number], strict=True)
        (better,) = {advantage > 0 for advantage, mask in advantages if mask}
        assert better == (row["extra_fields"]["session_id"] in ("a0", "b1"))


def test_trl_trains_on_the_rows_of_each_group(
    recorded: RunningGateway, tmp_path: Path, tiny_model: Path
) -> None:
    rows = export(recorded, format="trl")
    said = played(recorded, tmp_path, "trl", "trl", "steps", tiny_model)
    by_cursor = {row["cursor"]: row for row in rows}
    assert sorted(cursor for step in said["given"] for cursor in step) == sorted(by_cursor)
    tokens = 0
    for cursors, logged in zip(said["given"], said["logged"], strict=True):
        group = [by_cursor[cursor] for cursor in cursors]
        (group_id,) = {row["group_id"] for row in group}
        trained = [sum(row["env_mask"]) for row in group]
        tokens += sum(trained) + sum(len(row["prompt_ids"]) for row in group)
        assert logged["reward"] == pytest.approx({"a": 0.5, "b": 0.625}[group_id])
        assert logged["completions/mean_length"] == sum(trained) / len(group)
        assert logged["num_tokens"] == tokens
        assert logged["grad_norm"] > 0


def test_openenv_accepts_the_trace_of_each_session(recorded: RunningGateway, tmp_path: Path) -> None:
    traces = played(recorded, tmp_path, "openenv", "trl", "traces")
    assert list(traces) == list(REWARDS)
    for name, turns in traces.items():
        view = recorded.get(f"/sessions/{name}?tokens=true").json()["turns"]
        before: list[int] = []
        for (turn_id, prompt, output, logprobs, mask), turn in zip(turns, view, strict=True):
            before += turn["context_ids"]
            assert (turn_id, prompt, output) == (turn["turn_id"], before, turn["output_ids"])
            assert logprobs == turn["logprobs"]
            assert mask == [0] * len(prompt) + [1] * len(output)
            before += output
