"""The whole loop: calls are sampled, rewarded and trained, and the new version answers the next calls."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tests.support.system.real_system import ADMIN_KEY, System
from tests.support.tolerances import ulps
from tests.support.waiting import wait_until
from trainer_service.rows.rows import Row
from trainer_service.settings import TeacherSettings
from trainer_service.step.teacher import TeacherClient

TOOL: Any = {
    "type": "function",
    "function": {"name": "get", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}


def test_a_rewarded_group_becomes_the_next_version_that_answers(system: System) -> None:
    before = system.serving()
    session_ids = system.train_one_group()
    wait_until(lambda: system.serving() > before)
    version = system.serving()

    # The engine reports the version that it serves, and the next answer carries this version.
    engine = system.get("/model_info", url=system.engine_url)
    assert engine["weight_version"] == str(version)
    ticket = system.post("/sessions", {})
    system.say(ticket, "again")
    (turn,) = system.get(f"/sessions/{ticket['session_id']}")["turns"]
    assert {span["version"] for span in turn["versions"]} == {version}

    # Every session of the group has ended with a verdict that names step and version.
    for path in (f"/sessions/{session_id}" for session_id in session_ids):
        verdict = wait_until(lambda: (v := system.get(path)["verdict"])["code"] == "trained" and v)  # noqa: B023
        assert verdict["version"] == version

    # The ledger names each of their turns exactly once.
    ledger = system.trainer("/ledger?since=0")["data"]
    trained = [turn_id for row in ledger for turn_id in row["turns"]]
    turns = [turn["turn_id"] for name in session_ids for turn in system.get(f"/sessions/{name}")["turns"]]
    assert len(trained) == len(set(trained))
    assert set(turns) <= set(trained)


def converse(system: System, ticket: dict[str, Any], turns: int, max_tokens: int) -> None:
    """Play a conversation with this number of turns."""
    client = system.client(ticket)
    messages: list[Any] = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"go on {number}"})
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=max_tokens)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})


def test_trainer_and_engine_agree_on_the_logprobs_of_a_fresh_policy(system: System) -> None:
    """The trainer compares more than 1,000 tokens of several turns, and does so again with the new
    weights. The second time, all prompts begin as before: what the engine cached for the former weights would
    be wrong by far."""
    for _ in range(2):
        before, step = system.serving(), system.trainer("/status")["step"]
        tickets = system.post("/groups", {"size": 16})["sessions"]
        with ThreadPoolExecutor(len(tickets)) as pool:
            list(pool.map(lambda ticket: converse(system, ticket, turns=3, max_tokens=40), tickets))
        for index, ticket in enumerate(tickets):
            system.end(ticket, float(index % 2))
        wait_until(lambda: system.serving() > before)  # noqa: B023 - called in the same iteration
        status = wait_until(lambda: system.trainer("/status"))
        assert status["step"] == step + 1
        metrics = status["metrics"]
        assert metrics["tokens"] >= 1000
        # The log-probabilities are near -ln 1024, and each comes from float32 sums of at most 128 products.
        assert metrics["mismatch/abs_logp"] <= ulps(128, of=math.log(1024))
        assert metrics["staleness/total_max"] == 0


def test_a_teacher_judges_the_tokens_that_were_sampled(system: System) -> None:
    """The engine is its own teacher, so it gives each token the logprob with which it sampled the token."""
    ticket = system.post("/sessions", {})
    converse(system, ticket, turns=1, max_tokens=40)
    shown = system.get(f"/sessions/{ticket['session_id']}?tokens=true")["turns"]
    ids = [(turn["context_ids"], turn["output_ids"]) for turn in shown]
    mask = [bit for context, output in ids for bit in [0] * len(context) + [1] * len(output)]
    said = [lp for turn in shown for lp in [0.0] * len(turn["context_ids"]) + turn["logprobs"]]
    row = Row(
        session_id=ticket["session_id"],
        turn_ids=(),
        advantage=0.0,
        ids_L=np.array([token for context, output in ids for token in context + output]),
        mask_L=np.array(mask),
        logprobs_L=np.array(said, np.float32),
        versions_L=np.zeros(len(mask), np.int64),
        temperatures_L=np.ones(len(mask), np.float32),
        turns_L=np.zeros(len(mask), np.int64),
        rewards_L=np.zeros(len(mask), np.float32),
    )
    teacher = TeacherClient(TeacherSettings(url=system.engine_url), vocab_size=1024)
    try:
        (scored,) = teacher.score([row]).rows
    finally:
        teacher.close()
    assert scored.lp_teacher_L is not None
    # The longest float32 sum in a log-probability is the one over the vocabulary.
    assert float(np.abs(scored.lp_teacher_L - row.logprobs_L).max()) < ulps(1024, of=math.log(1024))


def test_a_rollback_and_a_promotion_are_served_under_their_old_numbers(system: System) -> None:
    version = system.trained()
    for path, body, number in (
        ("/admin/policies/rollback", {"to": 0}, 0),
        (f"/admin/policies/{version}/promote", {}, version),
    ):
        (result,) = system.post(path, body, key=ADMIN_KEY)["results"]
        assert (result["ok"], result["version_served"]) == (True, number)
        assert system.get("/model_info", url=system.engine_url)["weight_version"] == str(number)
        assert system.serving() == number
        ticket = system.post("/sessions", {})
        assert system.say(ticket, "who are you")
        (turn,) = system.get(f"/sessions/{ticket['session_id']}")["turns"]
        assert turn["versions"][0]["version"] == number


def test_a_group_without_differences_teaches_nothing_and_says_so(system: System) -> None:
    tickets = system.post("/groups", {"size": 2})["sessions"]
    for ticket in tickets:
        system.say(ticket, "same")
        system.end(ticket, 1.0)
    path = f"/sessions/{tickets[0]['session_id']}"
    verdict = wait_until(lambda: (v := system.get(path)["verdict"])["code"] == "zero_advantage" and v)
    assert verdict["detail"]


def test_the_official_client_streams_what_a_plain_call_would_say(system: System) -> None:
    client = system.client(system.post("/sessions", {"train": False}))
    assert system.settings.model_path is not None
    tokenizer = Tokenizer.from_file(str(system.settings.model_path / "tokenizer.json"))
    ends = [tokenizer.token_to_id(each) for each in ("<|im_end|>", "<|endoftext|>")]
    arguments: Any = {
        "model": "policy",
        "messages": [{"role": "user", "content": "one"}],
        "tools": [TOOL],
        "temperature": 0.0,
        "max_tokens": 64,
        "logit_bias": {str(each): -100 for each in ends},
        "logprobs": True,
    }
    plain = client.chat.completions.create(**arguments).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**arguments, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == plain.message.content
    assert (chunks[-1].finish_reason, plain.finish_reason) == ("length", "length")
    tokens = [len(chunk.logprobs.content or ()) for chunk in chunks if chunk.logprobs is not None]
    assert plain.logprobs is not None
    assert sum(tokens) == len(plain.logprobs.content or ()) == 64
    # How many tokens a chunk has depends on the machine. This answer is longer than its pauses.
    with client.chat.completions.create(**arguments | {"max_tokens": 3072}, stream=True) as long:
        first = next(len(heard.content or ()) for each in long if (heard := each.choices[0].logprobs))
    assert 0 < first < 3072, "a client hears an answer while it is made"
