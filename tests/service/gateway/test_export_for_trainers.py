"""Other trainers get each sampled token of a rewarded session once, with its logprob, version and mask."""

from typing import Any

from rollout_queue.contract.export_rows import Episode
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Reward, Sampling, SessionSpec, Span, Turn
from rollout_queue.redis.record_restore import restore
from tests.support.gateway.exports import episode, export
from tests.support.gateway.running import RunningGateway

OPENED_AT = 1000.0


def turn(name: str, context: list[int], output: list[int], **fields: Any) -> Turn:
    """Its logprobs are -(token id) / 64, so that a shifted one is seen."""
    spans = fields.pop("versions", ((3, len(output)),))
    starts = [sum(length for _, length in spans[:number]) for number in range(len(spans))]
    given: dict[str, Any] = {"session_id": "tree", "started_at": OPENED_AT + 10, "finish": "stop"} | fields
    return Turn(
        turn_id=name,
        context_ids=TokenIds(context),
        output_ids=TokenIds(output),
        logprobs=Logprobs([-token / 64 for token in output]),
        versions=tuple(
            Span(version, start, start + length)
            for (version, length), start in zip(spans, starts, strict=True)
        ),
        finished_at=given["started_at"] + 2,
        **given,
    )


TREE = (
    turn("root", [1, 2], [10, 11], versions=((3, 1), (4, 1)), sampling=Sampling(used={"temperature": 0.5})),
    turn("aside", [3], [20], train=False, side_call="title", started_at=OPENED_AT + 1),
    turn("second", [4, 5], [12], parent_id="root", relation="extends", started_at=OPENED_AT + 60),
    turn("fork", [6], [13, 14], parent_id="root", relation="forks", started_at=OPENED_AT + 20),
    turn("aborted", [7], [15], parent_id="fork", finish="abort", started_at=OPENED_AT + 40),
    turn("empty", [8], [], parent_id="fork", versions=(), started_at=OPENED_AT + 50),
)
"""root ─┬─ second           The fork is older than second. Of aside, aborted and empty, nothing is trained.
      └─ fork ─┬─ aborted
               └─ empty"""


def record(gateway: RunningGateway, *turns: Turn, reward: Reward | None = None, **fields: Any) -> None:
    """A session named `tree` straight into Redis, finished with a reward of 1 and, perhaps, another one."""
    status = fields.pop("status", "completed")
    last = Reward(session_id="tree", key="last", value=1.0, created_at=OPENED_AT + 90)
    group = {name: fields[name] for name in ("group_id", "group_size") if name in fields}
    kept = Episode(
        spec=SessionSpec(session_id="tree", created_at=OPENED_AT, **fields),
        turns=turns,
        rewards=(reward, last) if reward else (last,),
        outcome=Outcome(session_id="tree", status=status, created_at=OPENED_AT + 100, **group),
    )
    restore(gateway.redis, kept)


def finished(gateway: RunningGateway, reward: float | None = 1.0, turns: int = 1, **body: Any) -> str:
    """A session with calls to the gateway that has ended; its id."""
    session = episode(gateway, turns, **body)
    gateway.finish(session, **({} if reward is None else {"reward": reward}))
    return str(session["session_id"])


def test_a_branch_is_a_row_and_a_shared_turn_is_trained_in_the_older_one(gateway: RunningGateway) -> None:
    record(gateway, *TREE, task_id="sums")
    fork, second = export(gateway, format="trl")
    assert (fork["row"], second["row"], fork["rows"], second["rows"]) == (0, 1, 2, 2)
    assert fork["prompt_ids"] == second["prompt_ids"] == [1, 2]
    assert fork["completion_ids"] == [10, 11, 6, 13, 14]
    assert fork["env_mask"] == [1, 1, 0, 1, 1]
    assert fork["logprobs"] == [-10 / 64, -11 / 64, 0.0, -13 / 64, -14 / 64]
    assert fork["versions"] == [3, 4, -1, 3, 3]
    assert second["completion_ids"] == [10, 11, 4, 5, 12]
    assert second["env_mask"] == [0, 0, 0, 0, 1]
    assert second["logprobs"] == [0.0, 0.0, 0.0, 0.0, -12 / 64]
    assert second["versions"] == [-1, -1, -1, -1, 3]
    told = {"session_id": "tree", "group_id": "tree", "group_size": None, "task_id": "sums", "reward": 1.0}
    told |= {"status": "completed", "verdict": "ready", "created_at": OPENED_AT}
    for row in (fork, second):
        assert {name: row[name] for name in told} == told


def test_the_turns_of_a_row_say_where_their_tokens_are_and_what_they_earned(gateway: RunningGateway) -> None:
    own = Reward(session_id="tree", key="style", turn_id="fork", value=0.25, created_at=OPENED_AT + 60)
    record(gateway, *TREE, reward=own)
    fork, second = export(gateway, format="trl")
    assert (fork["reward"], second["reward"]) == (1.25, 1.25)
    root = {"turn_id": "root", "start": 0, "end": 2, "reward": None, "temperature": 0.5}
    root |= {"finish_reason": "stop", "trained": True}
    of_fork = {"turn_id": "fork", "start": 3, "end": 5, "reward": 0.25, "temperature": 1.0}
    assert fork["turns"] == [root, root | of_fork]
    assert second["turns"][0] == root | {"trained": False}


def test_verl_gets_the_same_rows_under_its_own_names(gateway: RunningGateway) -> None:
    record(gateway, *TREE, group_id="g", group_size=1)
    for verl, trl in zip(export(gateway, format="verl"), export(gateway, format="trl"), strict=True):
        same = {
            "prompt_ids": "prompt_ids",
            "response_ids": "completion_ids",
            "response_mask": "env_mask",
            "response_logprobs": "logprobs",
            "reward_score": "reward",
            "cursor": "cursor",
        }
        assert {name: verl[name] for name in same} == {name: trl[other] for name, other in same.items()}
        extra = verl["extra_fields"]
        assert (extra["uid"], extra["session_id"], extra["status"]) == ("g", "tree", "completed")
        assert (extra["response_versions"], extra["turns"]) == (trl["versions"], trl["turns"])
        assert verl["num_turns"] == 4
        assert verl["metrics"] == {"generate_sequences": 4.0}
    extras = [row["extra_fields"] for row in export(gateway, format="verl")]
    assert [(each["min_global_steps"], each["max_global_steps"]) for each in extras] == [(3, 4), (3, 3)]


def test_openenv_gets_each_call_once_with_its_whole_prompt(gateway: RunningGateway) -> None:
    record(gateway, *TREE)
    (row,) = export(gateway, format="openenv")
    assert (row["session_id"], row["reward"], row["trace"]["schema_version"]) == ("tree", 1.0, 1)
    turns = row["trace"]["turns"]
    assert [turn["node_id"] for turn in turns] == ["root", "fork", "second"]
    root, fork, second = turns
    assert (root["prompt_token_ids"], root["loss_mask"]) == ([1, 2], [0, 0, 1, 1])
    assert (fork["prompt_token_ids"], fork["completion_token_ids"]) == ([1, 2, 10, 11, 6], [13, 14])
    assert fork["loss_mask"] == [0, 0, 0, 0, 0, 1, 1]
    assert fork["per_token_logps"] == [-13 / 64, -14 / 64]
    assert (second["prompt_token_ids"], second["loss_mask"]) == ([1, 2, 10, 11, 4, 5], [0] * 6 + [1])
    assert root["metadata"]["sampling_params"] == {"temperature": 0.5}
    assert root["metadata"]["versions"] == [
        {"version": 3, "start": 0, "end": 1},
        {"version": 4, "start": 1, "end": 2},
    ]
    assert fork["metadata"]["parent_id"] == "root"


def test_a_context_turn_that_must_not_be_trained_is_masked(gateway: RunningGateway) -> None:
    pinned = turn("first", [1], [10], policy="policy@2")
    record(gateway, pinned, turn("then", [2], [11], parent_id="first", started_at=OPENED_AT + 20))
    (row,) = export(gateway, format="trl")
    assert (row["completion_ids"], row["env_mask"]) == ([10, 2, 11], [0, 0, 1])
    (trace,) = [row["trace"] for row in export(gateway, format="openenv")]
    assert [turn["loss_mask"] for turn in trace["turns"]] == [[0, 0], [0, 0, 0, 1]]
    (left,) = export(gateway, format="left_out")
    assert (left["turn_id"], left["verdict"]["code"]) == ("first", "not_for_training")


def test_what_was_sampled_through_the_gateway_comes_out_as_it_was(gateway: RunningGateway) -> None:
    name = finished(gateway, turns=3)
    view = gateway.get(f"/sessions/{name}?tokens=true").json()["turns"]
    (row,) = export(gateway, format="verl")
    assert row["prompt_ids"] == view[0]["context_ids"]
    assert row["prompt_ids"] + row["response_ids"] == [
        token for turn in view for token in turn["context_ids"] + turn["output_ids"]
    ]
    trained = zip(row["response_ids"], row["response_logprobs"], row["response_mask"], strict=True)
    sampled = [pair for turn in view for pair in zip(turn["output_ids"], turn["logprobs"], strict=True)]
    assert [(token, logprob) for token, logprob, mask in trained if mask] == sampled


# What is left out


def test_every_session_and_turn_is_either_trained_or_named_with_its_reason(gateway: RunningGateway) -> None:
    record(gateway, *TREE)
    finished(gateway, session_id="good")
    finished(gateway, session_id="unrewarded", reward=None)
    finished(gateway, session_id="evaluation", train=False)
    finished(gateway, session_id="callless", turns=0)
    finished(gateway, session_id="gone")
    gateway.call("DELETE", "/sessions/gone")
    gateway.session(session_id="going")
    gateway.session(session_id="broken")
    gateway.post("/sessions/broken/finish", {"status": "failed", "reward": 1.0, "reason": "no sandbox"})
    rows = export(gateway, format="left_out")
    assert {(row["session_id"], row["turn_id"]): row["verdict"]["code"] for row in rows} == {
        ("tree", "aside"): "not_for_training",
        ("tree", "aborted"): "aborted",
        ("tree", "empty"): "not_for_training",
        ("unrewarded", None): "waiting_reward",
        ("evaluation", None): "not_for_training",
        ("callless", None): "not_for_training",
        ("gone", None): "deleted",
        ("going", None): "open",
        ("broken", None): "failed",
    }
    assert all(row["verdict"]["detail"] for row in rows)
    for form in ("trl", "openenv"):
        assert {row["session_id"] for row in export(gateway, format=form)} == {"tree", "good"}


def test_a_truncated_session_comes_with_its_status(gateway: RunningGateway) -> None:
    record(gateway, *TREE, status="truncated")
    assert {row["status"] for row in export(gateway, format="trl")} == {"truncated"}


def test_a_group_comes_when_all_its_members_have_ended(gateway: RunningGateway) -> None:
    finished(gateway, session_id="one", group_id="g", group_size=2)
    assert export(gateway, format="verl") == []
    (left,) = export(gateway, format="left_out")
    assert (left["verdict"]["code"], left["session_id"]) == ("group_incomplete", "one")
    (row,) = export(gateway, format="verl", partial_groups=True)
    assert (row["extra_fields"]["uid"], row["extra_fields"]["group_size"]) == ("g", 2)
    assert export(gateway, format="left_out", partial_groups=True) == []
    finished(gateway, session_id="two", group_id="g", group_size=2, reward=0.0)
    rewards = [row["reward_score"] for row in export(gateway, format="verl")]
    assert rewards == [1.0, 0.0]


def test_a_session_whose_tree_is_broken_is_left_out_as_invalid(gateway: RunningGateway) -> None:
    record(gateway, turn("a", [1], [2]), turn("b", [3], [4], parent_id="nobody"))
    assert export(gateway, format="trl") == []
    (left,) = export(gateway, format="left_out")
    assert (left["turn_id"], left["verdict"]["code"]) == (None, "invalid")
    assert "turn b" in left["verdict"]["detail"]


# Windows and cursors


def test_an_export_for_trainers_goes_on_behind_any_row(gateway: RunningGateway) -> None:
    record(gateway, *TREE)
    for name in ("b", "a"):
        finished(gateway, session_id=name)
    gateway.session(session_id="open")
    for form in ("verl", "trl", "openenv", "left_out"):
        whole = export(gateway, format=form)
        assert len({row["cursor"] for row in whole}) == len(whole) > 2
        for number, row in enumerate(whole, start=1):
            assert export(gateway, format=form, cursor=row["cursor"]) == whole[number:], (form, number)
            assert export(gateway, format=form, limit=number) == whole[:number], (form, number)
    of_tree = {"format": "trl", "until": OPENED_AT + 1}
    assert len(export(gateway, **of_tree, since=OPENED_AT)) == 2, "a window takes whole sessions"
    assert export(gateway, **of_tree | {"until": OPENED_AT}) == []
    assert all(row["session_id"] != "tree" for row in export(gateway, format="trl", since=OPENED_AT + 1))


def test_the_cursor_of_a_session_that_is_left_out_since_goes_on_behind_it(gateway: RunningGateway) -> None:
    finished(gateway, session_id="a")
    finished(gateway, session_id="b")
    first, second = export(gateway, format="trl")
    gateway.call("DELETE", "/sessions/a")
    assert export(gateway, format="trl", cursor=first["cursor"]) == [second]


def test_a_line_longer_than_a_chunk_arrives_whole(gateway: RunningGateway) -> None:
    long = turn("long", [1], [7] * 300_000)
    record(gateway, long, turn("after", [2], [8], parent_id="long", started_at=OPENED_AT + 20))
    finished(gateway, session_id="next")
    first, second = export(gateway, format="openenv")
    assert [len(each["prompt_token_ids"]) for each in first["trace"]["turns"]] == [1, 300_002]
    assert second["session_id"] == "next"
