"""Client sessions are found, exported, forgotten long after their end, and deleted with all they made."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis.asyncio import Redis as AsyncRedis

from gateway.tinker.store import ClientRecordRemoval
from gateway.tinker.weights import KeptWeightsStore
from rollout_queue.redis import key_names
from rollout_queue.redis.client_session_scripts import CLOSE_SESSION, FORGET_MODEL
from rollout_queue.redis.command_log import CommandSubmissions
from rollout_queue.redis.lua import Script
from rollout_queue.redis.session_deletion import SESSIONS_AT_ONCE, StreamDeleter
from rollout_queue.trainer_commands import WHOLE_MODEL
from tests.support.gateway.running import ADMIN_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer
from tests.support.gateway.tinker_loop import ADAM, ONE, SamplingLoop, TinkerLoop, sampled
from tests.support.waiting import wait_until

BEST = {"path": "best", "ttl_seconds": 86400, "user_metadata": {"why": "test"}}
SAVES: list[tuple[str, dict[str, Any]]] = [
    ("save_weights", BEST),
    ("save_weights_for_sampler", {"path": "best"}),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 9}),
]


def trained(
    gateway: RunningGateway, backends: Backends, *saves: tuple[str, dict[str, Any]], **session: Any
) -> SamplingLoop:
    """A session that has made a step, and then these commands."""
    loop = SamplingLoop(gateway, str(backends.model_path)).start(**session).stepped()
    for number, (verb, body) in enumerate(saves, 3):
        loop.done(verb, number, **body)
    return loop


@pytest.fixture
def loop(gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer) -> SamplingLoop:
    return trained(gateway, backends, *SAVES)


def left(loop: SamplingLoop) -> set[str]:
    """The keys that are named after the session or what it has made, promises of samples excepted, which
    expire."""
    found = {each.decode() for each in loop.gateway.redis.scan_iter(f"*{loop.session_id}*", count=1000)}
    return {each for each in found if not each.startswith(("weir:cr:s:", "weir:cd:s:"))}


def lasting(*loops: SamplingLoop) -> set[str]:
    """The keys that are named after the sessions and do not expire: results do."""
    redis, names = loops[0].gateway.redis, [loop.session_id for loop in loops]
    found = {each.decode() for each in redis.scan_iter("*", count=1000)}
    return {each for each in found if any(name in each for name in names) and redis.ttl(each) == -1}


def named(loop: SamplingLoop) -> dict[str, Any]:
    """The lists in which the session or what it has made still is."""
    redis: Any = loop.gateway.redis
    ordered = [
        key_names.CLIENT_SESSIONS_ENDED,
        key_names.CLIENT_SESSIONS_LIVE,
        key_names.CLIENT_SESSIONS_DELETING,
    ]
    ordered += [key_names.KEPT_EXPIRES, *redis.scan_iter("weir:models:*")]
    ordered += redis.scan_iter("weir:client_sessions:*")
    lists = {name: redis.zrange(name, 0, -1) for name in ordered}
    lists |= {name: redis.smembers(name) for name in redis.scan_iter("weir:cu:*")}
    return {name: found for name, found in lists.items() if found}


def unread(loop: SamplingLoop) -> tuple[int, int]:
    """The bytes of commands that nobody has read, and the number of results."""
    redis: Any = loop.gateway.redis
    return int(redis.hget(key_names.COMMANDS_HELD, "unread")), int(redis.zcard(key_names.RESULTS_UNREAD))


def delete(loop: SamplingLoop, key: str = "") -> Any:
    return loop.call("DELETE", f"sessions/{loop.session_id}", key=key, timeout=120)


def sample_of(loop: SamplingLoop) -> tuple[dict[str, Any], str]:
    """A sample's promise, and the path of its session."""
    promise: dict[str, Any] = loop.ask(0, [1, 2], num_samples=2).json()
    sampled(loop.poll(promise))
    return promise, f"/sessions/{promise['sample_sequence_ids'][0].partition('.')[0]}"


# Deletion


class Killed(Exception):
    """The gateway ends here, and nothing is cleaned up."""


class WatchedRedis(AsyncRedis):
    """Calls `after` with the answer, each time when this script has run."""

    script: Script[Any]
    after: Callable[[Any], Any]

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        said = await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if args[:2] in (("EVALSHA", self.script.sha), ("EVAL", self.script.text)):
            await asyncio.to_thread(self.after, said)
        return said


async def removing(
    loop: SamplingLoop,
    script: Script[Any],
    after: Callable[[Any], Any],
    work: Callable[[ClientRecordRemoval], Any],
) -> None:
    """Do `work` as another gateway would, with a look at it whenever this script has run."""
    to = loop.gateway.redis.connection_pool.connection_kwargs
    async with WatchedRedis(host=to["host"], port=to["port"], db=to.get("db", 0)) as redis:
        redis.script, redis.after = script, after
        log = CommandSubmissions(redis, lambda: 0)
        await work(ClientRecordRemoval(redis, log, KeptWeightsStore(redis, log), StreamDeleter(redis)))


def test_a_deleted_session_leaves_nothing(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    promise, sample = sample_of(loop)
    assert loop.gateway.get(sample).status_code == 200
    assert len(left(loop)) >= 8, "session, made, model, kept, terms, two targets, samples, results"
    reply = delete(loop)
    counts = {"models": 1, "weights": 2, "samplers": 2, "samples": 1}
    assert (reply.status_code, reply.json()) == (200, {"session_id": loop.session_id, "deleted": counts})
    assert (left(loop), named(loop), unread(loop)) == (set(), {}, (0, 0))
    assert loop.gateway.get(sample).status_code == 410

    notes, saved = trainer.reader.dropped(), {each.number: each.position for each in trainer.seen}
    of_model = {name: drops[0].deleted for (_, name), drops in notes.weights.items()}
    gone = ("weights/best", "sampler_weights/best", "sampler_weights/~9", WHOLE_MODEL)
    assert of_model == dict.fromkeys(gone, saved[5])
    policy = loop.model_id.replace(":", ".")
    assert notes.adapters == {(policy, 4): saved[4], (policy, 5): saved[5]}

    assert (delete(loop).status_code, loop.finish()) == (404, 404)
    later = [
        loop.post("session_heartbeat", {"session_id": loop.session_id}),
        loop.command("optim_step", 6, adam_params=ADAM),
        loop.command("save_weights", 7, path="best", ttl_seconds=86400),
        loop.ask(1, [1, 2]),
        loop.poll(promise),
        loop.post("weights_info", {"tinker_path": f"tinker://{loop.model_id}/weights/best"}),
    ]
    assert [each.status_code for each in later] == [404] * len(later)
    assert left(loop) == set(), "no request brings a record back"


def test_only_its_owner_and_admins_delete_a_session(loop: SamplingLoop) -> None:
    before = left(loop)
    assert delete(loop, f"tml-{OTHER_KEY}").status_code == 404
    assert left(loop) == before
    assert delete(loop, f"tml-{ADMIN_KEY}").status_code == 200
    assert left(loop) == set()
    action = loop.gateway.admin("GET", "/actions").json()["data"][0]
    assert (action["method"], action["path"]) == ("DELETE", f"/api/v1/sessions/{loop.session_id}")


def test_commands_that_wait_are_never_carried_out(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    trainer.go_on.clear()
    promises = [loop.pass_(6, ONE).json(), loop.command("save_weights_for_sampler", 7, path="late").json()]
    promises.append(loop.command("save_weights", 9, path="early").json())  # waits for number 8
    assert delete(loop).status_code == 200
    assert [loop.poll(each).status_code for each in promises] == [404, 404, 404]
    trainer.go_on.set()  # it was about to carry out the first ones
    policy = loop.model_id.replace(":", ".")  # what it had published meanwhile goes, too
    wait_until(lambda: (policy, 7) in trainer.reader.dropped().adapters)
    assert (left(loop), named(loop)) == (set(), {})
    trainer.reader.free(trainer.seen[-1].position)
    assert trainer.reader.held_bytes()[0] == 0, "nothing is counted that is gone"


def test_commands_and_models_that_come_meanwhile_leave_nothing(
    loop: SamplingLoop, trainer: ScriptedTrainer
) -> None:
    def come(number: int) -> set[int]:
        save = {"path": f"s{number}", "ttl_seconds": 86400}
        of = {"session_id": loop.session_id, "base_model": loop.base_model}
        model = {"model_seq_id": number, "lora_config": {"rank": 8}, "type": "create_model"}
        answers = [
            loop.command("save_weights", number, **save),
            loop.post("create_model", of | model),
            loop.post("create_sampling_session", of | {"sampling_session_seq_id": number}),
            loop.ask(number, [1, 2]),
        ]
        return {each.status_code for each in answers}

    with ThreadPoolExecutor(4) as pool:
        coming = [pool.submit(come, number) for number in range(6, 26)]
        wait_until(lambda: any(each.number > 6 for each in trainer.seen))
        deletions = [pool.submit(delete, loop) for _ in range(2)]
        assert sorted(each.result().status_code for each in deletions) in ([200, 200], [200, 404])
        assert set().union(*(each.result() for each in coming)) <= {200, 400, 404}
    last = loop.gateway.redis.xinfo_stream(key_names.COMMANDS)["last-generated-id"].decode()
    wait_until(lambda: trainer.seen[-1].position == last)
    wait_until(lambda: not loop.gateway.redis.exists(key_names.user_sessions(loop.session_id)))
    assert (left(loop), named(loop)) == (set(), {})


def test_thousands_of_samples_are_deleted_some_at_a_time(loop: SamplingLoop, backends: Backends) -> None:
    for _ in range(2):
        made = loop.gateway.post("/groups", {"size": 1024, "user": loop.session_id, "train": False})
        assert made.status_code == 201
    redis: Any = loop.gateway.redis
    redis.config_resetstat()
    with backends.gateway(tinker={"session_timeout_s": 0.4}):  # it looks for interrupted deletions
        assert delete(loop).json()["deleted"]["samples"] == 2 * 1024
    stats: Any = redis.info("commandstats")
    pages = -(-2 * 1024 // SESSIONS_AT_ONCE)
    assert stats["cmdstat_srandmember"]["calls"] > pages, "no call asks for all"
    assert left(loop) == set()
    assert redis.hlen(key_names.DELETED) == 2 * 1024
    assert redis.xlen(key_names.STREAM) == 2 * 1024, "the deletions, for the trainer"


@pytest.mark.parametrize("script", [CLOSE_SESSION, FORGET_MODEL], ids=["closed", "model gone"])
def test_a_deletion_that_was_interrupted_is_finished(
    loop: SamplingLoop, backends: Backends, script: Script[Any]
) -> None:
    sample_of(loop)

    def killed(_: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        asyncio.run(removing(loop, script, killed, lambda removal: removal.delete_session(loop.session_id)))
    assert left(loop)
    # Long ago, for the gateways that leave a deletion to the one that began it.
    loop.gateway.redis.zadd(key_names.CLIENT_SESSIONS_DELETING, {loop.session_id: 0})
    assert delete(loop).status_code == 404, "it is on its way"
    with backends.gateway(tinker={"session_timeout_s": 0.4}):
        wait_until(lambda: not left(loop))
    assert (named(loop), unread(loop)) == ({}, (0, 0))


def test_the_deletion_of_a_user_covers_client_sessions(
    backends: Backends, gateway: RunningGateway, trainer: ScriptedTrainer
) -> None:
    ann = {"user_metadata": {"user": "ann", "why": "test"}}
    first, second = (trained(gateway, backends, *SAVES, **ann) for _ in range(2))
    other = trained(gateway, backends, *SAVES, user_metadata={"user": "bob"})
    _, sample = sample_of(first)
    assert gateway.get(sample).json()["user"] == "ann"
    copied = {"source_path": f"tinker://{second.model_id}/weights/best", "session_id": second.session_id}
    assert second.post("copy_weights", copied | {"model_seq_id": 7}).status_code == 200
    with backends.gateway(tinker={"session_retention_s": 0.1}):
        assert second.finish() == 200
        wait_until(lambda: not gateway.redis.exists(key_names.client_session(second.session_id)))
    assert left(second), "its named weights have outlasted it"

    assert gateway.call("DELETE", "/admin/users/ann/data").status_code == 403
    told = gateway.admin("DELETE", "/users/ann/data").json()
    assert told["deleted"] == {"sessions": 1, "turns": 2, "rewards": 0, "client_sessions": 1}
    assert (left(first), left(second)) == (set(), set())
    assert left(other), "another user keeps what is his"
    again = gateway.admin("DELETE", "/users/ann/data").json()
    assert again["deleted"] == {"sessions": 0, "turns": 0, "rewards": 0, "client_sessions": 0}
    begun = first.post("create_session", {"tags": [], "sdk_version": "0.38.0"} | ann)
    assert begun.status_code == 410
    wrong = first.post("create_session", {"tags": [], "user_metadata": {"user": "no name"}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "user_metadata")


def test_no_model_comes_back_to_a_user_who_is_deleted_meanwhile(
    backends: Backends, gateway: RunningGateway, trainer: ScriptedTrainer
) -> None:
    loop = trained(gateway, backends, *SAVES, user_metadata={"user": "ann"})
    assert loop.finish() == 200
    records, told = key_names.client_records_of_user("ann"), []

    def delete_user(gone: int) -> None:
        """As soon as the model has outlasted its session."""
        told.append((gone, loop.model_id.encode() in set[Any](gateway.redis.smembers(records))))
        assert gateway.admin("DELETE", "/users/ann/data").status_code == 200

    asyncio.run(removing(loop, FORGET_MODEL, delete_user, lambda removal: removal.forget_old(0.0)))
    assert told == [(0, True)]
    assert (left(loop), gateway.redis.exists(records)) == (set(), 0), "nothing has the name of the user"


# Retention


def test_sessions_that_ended_long_ago_leave_nothing(
    gateway: RunningGateway, trainer: ScriptedTrainer, backends: Backends
) -> None:
    loops = [trained(gateway, backends, SAVES[2]) for _ in range(3)]
    assert len(lasting(*loops)) >= 5 * len(loops), "session, made, model, kept, targets"
    assert [loop.finish() for loop in loops] == [200] * 3
    with backends.gateway(tinker={"session_retention_s": 0.1}):
        wait_until(lambda: not lasting(*loops))
        wait_until(lambda: not gateway.redis.zcard(key_names.CLIENT_SESSIONS_ENDED))
        assert loops[0].get("sessions").json() == {"sessions": []}
        assert loops[0].get("training_runs").json()["cursor"]["total_count"] == 0
        for loop in loops:
            assert loop.post("session_heartbeat", {"session_id": loop.session_id}).status_code == 404
            assert loop.finish() == 404
            assert loop.ask(0, [1, 2]).status_code == 404
            assert loop.command("optim_step", 4, adam_params=ADAM).status_code == 404
        assert not lasting(*loops), "no request brings a record back"


def test_named_weights_outlast_their_session(
    gateway: RunningGateway, trainer: ScriptedTrainer, backends: Backends
) -> None:
    with backends.gateway(tinker={"session_retention_s": 0.1}):
        loop = trained(gateway, backends, SAVES[0])
        assert loop.finish() == 200
        wait_until(lambda: not gateway.redis.exists(key_names.client_session(loop.session_id)))
        assert loop.get(f"sessions/{loop.session_id}").status_code == 404
        fields: Any = gateway.redis.hkeys(key_names.model(loop.model_id))
        assert not [each for each in fields if each.startswith(b"d:")], "no digests"
        kept = {
            key_names.model(loop.model_id),
            key_names.kept(loop.model_id),
            key_names.kept_terms(loop.model_id),
        }
        assert lasting(loop) == kept
        (found,) = loop.get("checkpoints").json()["checkpoints"]
        assert (found["checkpoint_id"], found["expires_at"] is None) == ("weights/best", False)
        refused = loop.command("optim_step", 2, adam_params=ADAM)
        assert (refused.status_code, "takes no more commands" in refused.text) == (404, True)

        later = trained(gateway, backends)
        into = {"session_id": later.session_id, "model_seq_id": 1, "path": found["tinker_path"]}
        loaded = loop.post("load_weights", into | {"optimizer": True})
        assert loaded.status_code == 200
        assert later.poll(loaded.json()).json()["type"] == "load_weights"

        gateway.redis.hdel(key_names.kept(loop.model_id), "weights/best")
        wait_until(lambda: not lasting(loop))
        listed = loop.get("training_runs").json()["training_runs"]
        assert loop.model_id not in [each["training_run_id"] for each in listed]


def test_signs_of_life_and_a_second_finish_postpone_no_end(
    backends: Backends, gateway: RunningGateway
) -> None:
    loop = SamplingLoop(gateway, str(backends.model_path)).start()
    with backends.gateway(tinker={"session_timeout_s": 0.2}) as impatient:
        redis, ended = impatient.redis, key_names.CLIENT_SESSIONS_ENDED
        first = wait_until(lambda: redis.zscore(ended, loop.session_id))
        wait_until(lambda: redis.zscore(key_names.CLIENT_SESSIONS_LIVE, loop.session_id) is None)
        assert loop.post("session_heartbeat", {"session_id": loop.session_id}).status_code == 200
        assert [loop.finish(), loop.finish()] == [200, 200]
        assert redis.zscore(ended, loop.session_id) == first
        assert redis.zscore(key_names.CLIENT_SESSIONS_LIVE, loop.session_id) is None
        body = {"session_id": loop.session_id, "model_seq_id": 1, "base_model": loop.base_model}
        refused = loop.post("create_model", body | {"lora_config": {"rank": 8}, "type": "create_model"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "session_ended")
        assert not redis.exists(key_names.model(f"{loop.session_id}:train:1"))


@pytest.mark.parametrize("packed", [b"\x02a newer schema", b"\x01no record"])
def test_a_record_that_cannot_be_read_stops_no_other_end(
    backends: Backends, gateway: RunningGateway, trainer: ScriptedTrainer, packed: bytes
) -> None:
    redis = gateway.redis
    first, other = (trained(gateway, backends) for _ in range(2))
    redis.hset(key_names.kept(first.model_id), "weights/best", packed)
    with backends.gateway(tinker={"session_timeout_s": 0.2, "session_retention_s": 0.1}):
        wait_until(lambda: not lasting(other))
        wait_until(lambda: redis.zscore(key_names.CLIENT_SESSIONS_LIVE, first.session_id) is None)
        assert redis.hget(key_names.model(first.model_id), "ended"), "its memory is free"
        assert redis.hget(key_names.kept(first.model_id), "weights/best") == packed
        redis.hdel(key_names.kept(first.model_id), "weights/best")
        wait_until(lambda: not lasting(first))


def test_a_bug_does_not_end_the_sweeping(backends: Backends, gateway: RunningGateway) -> None:
    redis = gateway.redis
    broken: Any = {b"\xff": 1.0}  # no text
    redis.zadd(key_names.CLIENT_SESSIONS_ENDED, broken)
    with backends.gateway(tinker={"session_timeout_s": 0.2}):
        for _ in range(2):
            name = began(SamplingLoop(gateway, str(backends.model_path)))
            wait_until(lambda: redis.zscore(key_names.CLIENT_SESSIONS_ENDED, name))  # noqa: B023


# Exports


def export(loop: SamplingLoop) -> Any:
    return loop.get(f"sessions/{loop.session_id}/export")


def exported(loop: SamplingLoop) -> list[dict[str, Any]]:
    return [json.loads(line) for line in export(loop).text.splitlines()]


def test_an_export_has_all_that_a_session_has_made(
    gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer
) -> None:
    about = {"tags": ["t"], "user_metadata": {"user": "ann", "why": "test"}, "display_name": "d"}
    loop = SamplingLoop(gateway, str(backends.model_path)).start(**about)
    loop.pass_(1, ONE)
    loop.done("save_weights", 2, **BEST)
    trainer.go_on.clear()
    loop.command("optim_step", 3, adam_params=ADAM)
    loop.command("optim_step", 5, adam_params=ADAM)
    _, sample = sample_of(loop)
    reply = export(loop)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/jsonl")
    of: dict[str, list[dict[str, Any]]] = {}
    for line in exported(loop):
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
    assert (weights["user_metadata"], weights["public"]) == ({"why": "test"}, False)
    assert [each["sampling_session_id"] for each in of["sampler"]] == [loop.sampler]
    assert [f"/sessions/{each['session_id']}" for each in of["sample"]] == [sample]

    assert export(loop.of_another_key()).status_code == 404
    loop.finish()
    ended = exported(loop)
    assert (ended[0]["finished"]["reason"], "finished" in ended[1]["ended"]) == ("success", True)
    assert 5 not in [each.get("seq_id") for each in ended], "what waited for an earlier command is gone"
    delete(loop)
    assert export(loop).status_code == 404
    trainer.go_on.set()


def test_an_export_of_many_samples_reads_some_at_a_time(
    gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer
) -> None:
    loop = SamplingLoop(gateway, str(backends.model_path)).start()
    names = {f"sample-{number:032}" for number in range(3000)}
    gateway.redis.sadd(key_names.user_sessions(loop.session_id), *names)
    redis: Any = gateway.redis
    redis.config_resetstat()
    assert {each["session_id"] for each in exported(loop) if each["type"] == "sample"} == names
    assert redis.info("commandstats")["cmdstat_sscan"]["calls"] > 3


# Search


@pytest.fixture
def client(gateway: RunningGateway, backends: Backends) -> TinkerLoop:
    return TinkerLoop(gateway, str(backends.model_path))


def began(loop: TinkerLoop, **given: Any) -> str:
    body = {"tags": [], "sdk_version": "0.38.0", "type": "create_session", **given}
    session_id: str = loop.post("create_session", body).json()["session_id"]
    return session_id


def search(loop: TinkerLoop, **asked: Any) -> Any:
    """As the SDK asks."""
    body = {"user_metadata": {}, "owner": {"type": "own"}, "limit": 50} | asked
    reply = loop.post("sessions/search", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def found(loop: TinkerLoop, **asked: Any) -> list[str]:
    return [each["session_id"] for each in search(loop, **asked)["sessions"]]


def test_sessions_are_found_by_their_names_metadata_and_ids(client: TinkerLoop) -> None:
    nightly = began(client, display_name="Nightly run of MATH", user_metadata={"team": "a", "size": "8"})
    daily = began(client, display_name="daily", user_metadata={"team": "a", "rank": 8})
    plain = began(client)
    assert found(client) == [plain, daily, nightly], "the newest first"
    assert found(client, display_name="math nightly") == [nightly]
    assert found(client, display_name="night day") == []
    assert found(client, user_metadata={"team": "a"}) == [daily, nightly]
    assert found(client, user_metadata={"team": "a", "size": "8"}) == [nightly]
    assert found(client, user_metadata={"rank": "8"}) == [daily], "a value that is no text is found as JSON"
    assert found(client, session_id=plain) == [plain]
    assert found(client, session_id=plain, display_name="DAILY") == [plain, daily], "either one"
    assert found(client, session_id=plain, user_metadata={"team": "a"}) == []
    assert found(client, session_id="run-unknown") == []
    assert found(client, owner={"type": "accessible"}) == [plain, daily, nightly]

    other = client.of_another_key()
    theirs = began(other, display_name="daily")
    assert found(other, display_name="daily") == [theirs]
    assert found(other, owner={"type": "accessible"}) == [theirs]
    assert found(other, session_id=daily) == []


def test_sessions_are_found_by_how_they_are(client: TinkerLoop) -> None:
    runs, well, broken, silent = (began(client) for _ in range(4))
    for session_id, reason in ((well, "success"), (broken, "errored")):
        client.session_id = session_id
        assert client.finish(reason, detail="told") == 200
    client.gateway.redis.zadd(key_names.CLIENT_SESSIONS_ENDED, {silent: 1.0})
    by = {each["session_id"]: each["status"] for each in search(client)["sessions"]}
    assert (by[runs], by[silent]) == ({"type": "active"}, None)
    assert by[well] == {"type": "client_finished", "reason": {"type": "success"}, "detail": "told"}
    assert found(client, statuses=[{"type": "active"}]) == [runs]
    assert found(client, statuses=[{"type": "client_finished"}]) == [broken, well]
    errored = {"type": "client_finished", "reasons": ["errored"]}
    assert found(client, statuses=[{"type": "active"}, errored]) == [broken, runs]
    assert found(client, statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []


def test_pages_follow_one_another(client: TinkerLoop) -> None:
    made = [began(client, display_name=f"run {at % 2}") for at in range(7)][::-1]
    seen, asked = [], {"limit": 3}
    for _ in range(3):
        page = search(client, **asked)
        seen += [each["session_id"] for each in page["sessions"]]
        began(client)  # a newer one moves nothing
        asked = {"limit": 3, "cursor": page["next_cursor"]}
    assert (seen, page["next_cursor"]) == (made, None)
    first = search(client, limit=2, display_name="0")
    rest = search(client, limit=50, display_name="0", cursor=first["next_cursor"])
    assert [each["session_id"] for each in first["sessions"] + rest["sessions"]] == made[::2]
    gone = {"last_created_at": first["next_cursor"]["last_created_at"], "last_session_id": "run-forgotten"}
    after = search(client, limit=50, display_name="0", cursor=gone)
    assert after["sessions"] == rest["sessions"], "also when the last one's record is removed"


def test_a_session_tells_what_it_holds(client: TinkerLoop, trainer: ScriptedTrainer) -> None:
    client.begin()
    for number, verb in enumerate(("save_weights", "save_weights_for_sampler"), 1):
        client.done(verb, number, path="x")
    (session,) = search(client, session_id=client.session_id)["sessions"]
    assert (session["checkpoints_count"], session["checkpoint_storage_bytes"]) == (2, 1234)
    assert (session["project_id"], session["user_metadata"]) == ("", None)
    assert isinstance(session["owner"], str)


NO_CURSOR = {"last_created_at": "yesterday", "last_session_id": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"project_ids": ["x"]}, "project_ids"),
    ({"owner": {"type": "user", "owner_urns": ["urn:x"]}}, "owner"),
    ({"owner": {"type": "all"}}, "owner"),
    ({"statuses": []}, "statuses"),
    ({"statuses": [{"type": "asleep"}]}, "statuses"),
    ({"display_name": ""}, "display_name"),
    ({"limit": 201}, "limit"),
    ({"limit": 0}, "limit"),
    ({"colour": "red"}, "colour"),
    ({"cursor": NO_CURSOR}, "last_created_at"),
    ({"cursor": NO_CURSOR | {"last_created_at": "2026-01-01T00:00:00"}}, "last_created_at"),
]


def test_a_filter_that_is_not_served_is_named(client: TinkerLoop) -> None:
    for asked, name in REFUSED:
        refused = client.post("sessions/search", asked)
        assert (refused.status_code, name in refused.json()["error"]["message"]) == (400, True), asked


def test_a_page_reads_so_many_models_and_names_the_next_one(
    client: TinkerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tinker.run_listing.MOST_MODELS", 1)
    sessions: list[str] = []
    for _ in range(3):
        client.begin()
        sessions.insert(0, client.session_id)
    pages: list[list[str]] = []
    asked: dict[str, Any] = {}
    while not pages or asked["cursor"] is not None:
        told = search(client, **asked)
        pages.append([each["session_id"] for each in told["sessions"]])
        asked["cursor"] = told["next_cursor"]
    assert [each for page in pages for each in page] == sessions
    assert len(pages) == 3
