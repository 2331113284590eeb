"""`GET /sessions/{id}` shows the text of each token, of chosen turns, in parts; and why none was trained."""

from typing import Any

import pytest

from gateway.rest import views
from gateway.sessions.verdicts import CONTEXT
from rollout_queue.contract.codec import encode
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Span
from rollout_queue.redis import key_names
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.queue.records import turn

PROMPT, ANSWER = "Why? 日本\n<b>hé</b>", "Because \u202e🦦 of\x00 it"


@pytest.fixture
def path(gateway: RunningGateway, backends: Backends) -> str:
    session_id = str(gateway.session(group_id="g", group_size=2)["session_id"])
    for number in range(2):
        context = backends.tokenizer.encode(PROMPT, add_special_tokens=False).ids
        output = backends.tokenizer.encode(ANSWER, add_special_tokens=False).ids
        recorded = turn(
            f"t{number}",
            session_id,
            parent_id=f"t{number - 1}" if number else None,
            context_ids=TokenIds(context),
            output_ids=TokenIds(output),
            logprobs=Logprobs([-0.5] * len(output)),
            versions=(Span(3, 0, len(output)),),
            finished_at=101.0 + number,
        )
        gateway.redis.hset(key_names.session(session_id), f"t:t{number}", encode(recorded))
    return f"/sessions/{session_id}"


def turns(gateway: RunningGateway, path: str, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.get(f"{path}?{query}").json()["turns"]
    return found


def test_each_token_has_its_text_and_a_character_of_several_tokens_is_in_the_first(
    gateway: RunningGateway, path: str
) -> None:
    for each in turns(gateway, path, "tokens=true&token_texts=true"):
        context, output = each["context_token_texts"], each["output_token_texts"]
        assert (len(context), len(output)) == (each["context_len"], each["output_len"])
        assert "".join(text or "" for text in context) == PROMPT
        assert "".join(text or "" for text in output) == ANSWER
        assert "🦦" in output
        assert output[output.index("🦦") + 1] is None


def test_one_turn_and_a_part_of_its_tokens_can_be_chosen(gateway: RunningGateway, path: str) -> None:
    (whole,) = turns(gateway, path, "tokens=true&token_texts=true&turn_id=t1")
    length = whole["context_len"] + whole["output_len"]
    both = {name: whole[f"context_{name}"] + whole[f"output_{name}"] for name in ("ids", "token_texts")}
    got: dict[str, list[Any]] = {"ids": [], "token_texts": []}
    logprobs = []
    for start in range(0, length, 5):
        window = f"token_start={start}&token_end={start + 5}"
        (part,) = turns(gateway, path, f"tokens=true&token_texts=true&turn_id=t1&{window}")
        assert part["window"] == {"start": start, "end": min(start + 5, length)}
        for name, values in got.items():
            values += part[f"context_{name}"] + part[f"output_{name}"]
        logprobs += part["logprobs"]
    assert (got["ids"], logprobs) == (both["ids"], whole["logprobs"])
    assert [text for text in got["token_texts"] if text] == [text for text in both["token_texts"] if text]
    assert (whole["turn_id"], "window" in whole) == ("t1", False)
    assert len(turns(gateway, path, "turn_id=t0&turn_id=t1")) == 2


def test_bad_choices_are_refused(gateway: RunningGateway, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gateway.get(f"{path}?turn_id=none").status_code == 404
    many = "&".join(["turn_id=t0"] * 101)
    for bad in ("token_start=1", "turn_id=t0&token_start=3&token_end=2", "token_end=-1&turn_id=t0", many):
        assert gateway.get(f"{path}?{bad}").status_code == 400, bad
    monkeypatch.setattr(views, "MOST_TOKEN_TEXTS", 30)
    refused = gateway.get(f"{path}?token_texts=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "token_texts")
    assert len(turns(gateway, path, "token_texts=true&turn_id=t0&token_end=30")) == 1


def test_a_session_says_why_none_of_its_tokens_is_trained(gateway: RunningGateway, path: str) -> None:
    gateway.post(f"{path}/finish", {"status": "completed", "reward": 0.25})
    other = gateway.session(group_id="g", group_size=2)["session_id"]
    gateway.post(f"/sessions/{other}/finish", {"status": "completed", "reward": 0.25})
    verdict = b'{"code":"zero_advantage","detail":"no rollout of the group has an advantage"}'
    gateway.redis.hset(key_names.session(path.removeprefix("/sessions/")), "verdict", verdict)
    view = gateway.get(f"{path}?tokens=true").json()
    assert view["why"] == "All 2 rewards of its group are 0.25, so its advantage is 0."
    for each in view["turns"]:
        first, last = each["context_len"], each["context_len"] + each["output_len"]
        assert each["why"] == view["why"]
        assert each["untrained"] == [
            {"start": 0, "end": first, "why": CONTEXT},
            {"start": first, "end": last, "why": view["why"]},
        ]
