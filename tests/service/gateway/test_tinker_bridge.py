"""Recorded sessions as the data of a Tinker loop: each sampled token at the position that predicts it."""

import httpx
import pytest

from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, RunningGateway
from weir.tinker import RecordedRow, group_advantages, recorded, token_inputs


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
        path = f"/sessions/{session['session_id']}"
        for text in ("hi", "again")[: reward + 1]:
            assert gateway.chat(text, f"{path}/v1/chat/completions").status_code == 200
        gateway.post(f"{path}/finish", {"status": "completed", "reward": float(reward)})
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
