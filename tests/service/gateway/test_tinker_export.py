"""The owner of a client session gets what is kept of it as lines of JSON."""

import json
from typing import Any

from rollout_queue.redis import keys
from tests.support.gateway.running import OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer
from tests.support.gateway.tinker_loop import ADAM, SamplingLoop, datum, sampled

ONE = datum([1, 2, 3], [2, 3, 7], weights=[0.0, 1.0, -2.5])


def export(loop: SamplingLoop, key: str | None = None) -> Any:
    headers = {"x-api-key": key or loop.key}
    path = f"/api/v1/sessions/{loop.session_id}/export"
    return loop.gateway.call("GET", path, key=None, headers=headers)


def test_an_export_has_all_that_a_session_has_made(
    gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer
) -> None:
    about = {"tags": ["t"], "user_metadata": {"user": "ann", "why": "test"}, "display_name": "d"}
    loop = SamplingLoop(gateway, str(backends.model_path)).start(**about)
    loop.pass_(1, ONE)
    saved = loop.command("save_weights", 2, path="best", ttl_seconds=86400, user_metadata={"n": 1}).json()
    loop.poll(saved)
    trainer.go_on.clear()
    loop.command("optim_step", 3, adam_params=ADAM)
    loop.command("optim_step", 5, adam_params=ADAM)
    sample = loop.ask(0, [1, 2]).json()
    sampled(loop.poll(sample))
    reply = export(loop)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/jsonl")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    of: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        of.setdefault(line["type"], []).append(line)
    (session,), (model,), (weights,) = of["session"], of["model"], of["weights"]
    assert {name: session[name] for name in about} == about
    assert (session["session_id"], session["user"], session["finished"]) == (loop.session_id, "ann", None)
    assert (model["model_id"], model["ended"], model["lora"]["rank"]) == (loop.model_id, None, 8)
    commands = [(each["seq_id"], each["kind"], each["state"]) for each in of["command"]]
    assert commands == [
        (0, "create", "done"),
        (1, "forward_backward", "done"),
        (2, "save_weights", "done"),
        (3, "optim_step", "waits"),
        (5, "optim_step", "waits for earlier ones"),
    ]
    times = [each["created_at"] for each in of["command"]]
    assert session["created_at"] - 1 < times[0] <= times[-1] == max(times)
    assert (weights["path"], weights["size_bytes"]) == (f"tinker://{loop.model_id}/weights/best", 1234)
    assert (weights["user_metadata"], weights["public"]) == ({"n": 1}, False)
    assert [each["sampling_session_id"] for each in of["sampler"]] == [loop.sampler]
    assert [each["session_id"] for each in of["sample"]] == [sample["sample_sequence_ids"][0][:-2]]

    assert export(loop, f"tml-{OTHER_KEY}").status_code == 404
    loop.post(f"sessions/{loop.session_id}/finish", {"reason": {"type": "success"}})
    ended = [json.loads(line) for line in export(loop).text.splitlines()]
    assert (ended[0]["finished"]["reason"], "finished" in ended[1]["ended"]) == ("success", True)
    assert 5 not in [each.get("seq_id") for each in ended], "what waited for an earlier command is gone"
    loop.gateway.call(
        "DELETE", f"/api/v1/sessions/{loop.session_id}", key=None, headers={"x-api-key": loop.key}
    )
    assert export(loop).status_code == 404
    trainer.go_on.set()


def test_an_export_of_many_samples_reads_some_at_a_time(
    gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer
) -> None:
    loop = SamplingLoop(gateway, str(backends.model_path)).start()
    names = {f"sample-{number:032}" for number in range(3000)}
    gateway.redis.sadd(keys.user_sessions(loop.session_id), *names)
    redis: Any = gateway.redis
    redis.config_resetstat()
    lines = [json.loads(line) for line in export(loop).text.splitlines()]
    assert {each["session_id"] for each in lines if each["type"] == "sample"} == names
    assert redis.info("commandstats")["cmdstat_sscan"]["calls"] > 3
