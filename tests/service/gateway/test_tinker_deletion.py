"""A client session is deleted with all that it has made: by its owner, or with the data of its user."""

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis.asyncio import Redis as AsyncRedis

from gateway.rest.tinker_api.user_data.removal import ClientRecordRemoval
from gateway.rest.tinker_api.weights import KeptWeightsStore
from rollout_queue.commands.log import WHOLE_MODEL
from rollout_queue.redis import keys
from rollout_queue.redis.commands.submission import CommandSubmissions
from rollout_queue.redis.deletion import SESSIONS_AT_ONCE, RedisDeleter
from rollout_queue.redis.scripts.client_sessions import CLOSE_SESSION, FORGET_MODEL
from tests.support.gateway.running import ADMIN_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer
from tests.support.gateway.tinker_loop import ADAM, SamplingLoop, datum, sampled
from tests.support.waiting import wait_until

ONE = datum([1, 2, 3], [2, 3, 7], weights=[0.0, 1.0, -2.5])
SAVES: list[tuple[str, dict[str, Any]]] = [
    ("save_weights", {"path": "best", "ttl_seconds": 86400, "user_metadata": {"why": "test"}}),
    ("save_weights_for_sampler", {"path": "best"}),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 9}),
]


@pytest.fixture
def loop(gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer) -> SamplingLoop:
    return trained(SamplingLoop(gateway, str(backends.model_path)).start())


def trained(loop: SamplingLoop) -> SamplingLoop:
    """A session that has made a step, and saved its weights."""
    promises = [loop.pass_(1, ONE).json(), loop.command("optim_step", 2, adam_params=ADAM).json()]
    promises += [loop.command(verb, 3 + at, **body).json() for at, (verb, body) in enumerate(SAVES)]
    for promise in promises[1:]:  # nobody reads the result of the pass
        loop.poll(promise)
    return loop


class Killed(Exception):
    """The gateway ends here, and nothing is cleaned up."""


class WatchedRedis(AsyncRedis):
    """Calls `after` with the answer, each time when this script has run."""

    script = ""
    after: Callable[[Any], Any]

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        said = await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if args[:2] == ("EVALSHA", hashlib.sha1(self.script.encode()).hexdigest()):  # noqa: S324
            await asyncio.to_thread(self.after, said)
        return said


async def removing(
    loop: SamplingLoop, script: str, after: Callable[[Any], Any], work: Callable[[ClientRecordRemoval], Any]
) -> None:
    """Do `work` as another gateway would, with a look at it whenever this script has run."""
    to = loop.gateway.redis.connection_pool.connection_kwargs
    async with WatchedRedis(host=to["host"], port=to["port"], db=to.get("db", 0)) as redis:
        redis.script, redis.after = script, after
        log = CommandSubmissions(redis, lambda: 0)
        await work(ClientRecordRemoval(redis, log, KeptWeightsStore(redis, log), RedisDeleter(redis)))


def delete(loop: SamplingLoop, key: str | None = None) -> Any:
    path, headers = f"/api/v1/sessions/{loop.session_id}", {"x-api-key": key or loop.key}
    return loop.gateway.call("DELETE", path, key=None, headers=headers, timeout=120)


def left(loop: SamplingLoop) -> set[str]:
    """The keys that are named after the session or what it has made, promises of samples excepted, which
    expire."""
    found = {each.decode() for each in loop.gateway.redis.scan_iter(f"*{loop.session_id}*", count=1000)}
    return {each for each in found if not each.startswith(("weir:cr:s:", "weir:cd:s:"))}


def named(loop: SamplingLoop) -> dict[str, Any]:
    """The lists in which the session or what it has made still is."""
    redis: Any = loop.gateway.redis
    lists = {
        name: redis.zrange(name, 0, -1)
        for name in (
            keys.CLIENT_SESSIONS_ENDED,
            keys.CLIENT_SESSIONS_LIVE,
            keys.CLIENT_SESSIONS_DELETING,
            keys.KEPT_EXPIRES,
        )
    }
    lists |= {name: redis.zrange(name, 0, -1) for name in redis.scan_iter("weir:models:*")}
    lists |= {name: redis.zrange(name, 0, -1) for name in redis.scan_iter("weir:client_sessions:*")}
    lists |= {name: redis.smembers(name) for name in redis.scan_iter("weir:cu:*")}
    return {name: found for name, found in lists.items() if found}


def test_a_deleted_session_leaves_nothing(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    promise = loop.ask(0, [1, 2], num_samples=2).json()
    sampled(loop.poll(promise))
    sample = f"/sessions/{promise['sample_sequence_ids'][0].partition('.')[0]}"
    assert loop.gateway.get(sample).status_code == 200
    assert len(left(loop)) >= 8, "session, made, model, kept, terms, two targets, samples, results"
    reply = delete(loop)
    counts = {"models": 1, "weights": 2, "samplers": 2, "samples": 1}
    assert (reply.status_code, reply.json()) == (200, {"session_id": loop.session_id, "deleted": counts})
    assert (left(loop), named(loop)) == (set(), {})
    assert loop.gateway.get(sample).status_code == 410
    unread: Any = loop.gateway.redis.hget(keys.COMMANDS_HELD, "unread")
    assert (int(unread), loop.gateway.redis.zcard(keys.RESULTS_UNREAD)) == (0, 0)

    notes, saved = trainer.reader.dropped(), {each.number: each.position for each in trainer.seen}
    of_model = {name: drops[0].deleted for (_, name), drops in notes.weights.items()}
    gone = ("weights/best", "sampler_weights/best", "sampler_weights/~9", WHOLE_MODEL)
    assert of_model == dict.fromkeys(gone, saved[5])
    policy = loop.model_id.replace(":", ".")
    assert notes.adapters == {(policy, 4): saved[4], (policy, 5): saved[5]}

    assert delete(loop).status_code == 404
    finish = {"reason": {"type": "success"}}
    later = [
        loop.post(f"sessions/{loop.session_id}/finish", finish),
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
    actions = loop.gateway.get("/admin/actions", key=ADMIN_KEY).json()["data"]
    assert (actions[0]["method"], actions[0]["path"]) == ("DELETE", f"/api/v1/sessions/{loop.session_id}")


def test_commands_that_wait_are_never_carried_out(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    trainer.go_on.clear()
    promises = [loop.pass_(6, ONE).json(), loop.command("save_weights_for_sampler", 7, path="late").json()]
    promises.append(loop.command("save_weights", 9, path="early").json())  # waits for number 8
    assert delete(loop).status_code == 200
    assert [loop.poll(each).status_code for each in promises] == [404, 404, 404]
    trainer.go_on.set()  # it was about to carry out the first ones
    wait_until(lambda: trainer.seen[-1].number == 7)
    assert (left(loop), named(loop)) == (set(), {})
    policy = loop.model_id.replace(":", ".")
    assert (policy, 7) in trainer.reader.dropped().adapters, "what it had published meanwhile goes, too"
    trainer.reader.free(trainer.seen[-1].position)
    assert trainer.reader.held_bytes()[0] == 0, "nothing is counted that is gone"


def test_commands_and_models_that_come_meanwhile_leave_nothing(
    loop: SamplingLoop, trainer: ScriptedTrainer
) -> None:
    def come(number: int) -> set[int]:
        save = {"path": f"s{number}", "ttl_seconds": 86400}
        body = {"session_id": loop.session_id, "model_seq_id": number, "base_model": loop.base_model}
        sampler = {k: v for k, v in body.items() if k != "model_seq_id"} | {"sampling_session_seq_id": number}
        answers = [
            loop.command("save_weights", number, **save),
            loop.post("create_model", body | {"lora_config": {"rank": 8}, "type": "create_model"}),
            loop.post("create_sampling_session", sampler),
            loop.ask(number, [1, 2]),
        ]
        return {each.status_code for each in answers}

    with ThreadPoolExecutor(4) as pool:
        coming = [pool.submit(come, number) for number in range(6, 26)]
        wait_until(lambda: trainer.seen[-1].number > 6)
        deletions = [pool.submit(delete, loop) for _ in range(2)]
        assert sorted(each.result().status_code for each in deletions) in ([200, 200], [200, 404])
        assert set().union(*(each.result() for each in coming)) <= {200, 400, 404}
    last = loop.gateway.redis.xinfo_stream(keys.COMMANDS)["last-generated-id"].decode()
    wait_until(lambda: trainer.seen[-1].position == last)
    wait_until(lambda: not loop.gateway.redis.exists(keys.user_sessions(loop.session_id)))
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
    assert redis.hlen(keys.DELETED) == 2 * 1024
    assert redis.xlen(keys.STREAM) == 2 * 1024, "the deletions, for the trainer"


@pytest.mark.parametrize("script", [CLOSE_SESSION, FORGET_MODEL], ids=["closed", "model gone"])
def test_a_deletion_that_was_interrupted_is_finished(
    loop: SamplingLoop, backends: Backends, script: str
) -> None:
    sampled(loop.poll(loop.ask(0, [1, 2]).json()))

    def killed(_: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        asyncio.run(removing(loop, script, killed, lambda removal: removal.delete_session(loop.session_id)))
    assert left(loop)
    # Long ago, for the gateways that leave a deletion to the one that began it.
    loop.gateway.redis.zadd(keys.CLIENT_SESSIONS_DELETING, {loop.session_id: 0})
    assert delete(loop).status_code == 404, "it is on its way"
    with backends.gateway(tinker={"session_timeout_s": 0.4}):
        wait_until(lambda: not left(loop))
    assert named(loop) == {}
    unread: Any = loop.gateway.redis.hget(keys.COMMANDS_HELD, "unread")
    assert (int(unread), loop.gateway.redis.zcard(keys.RESULTS_UNREAD)) == (0, 0)


def test_the_deletion_of_a_user_covers_client_sessions(
    backends: Backends, gateway: RunningGateway, trainer: ScriptedTrainer
) -> None:
    model = str(backends.model_path)
    ann = {"user_metadata": {"user": "ann", "why": "test"}}
    first, second = (trained(SamplingLoop(gateway, model).start(**ann)) for _ in range(2))
    other = trained(SamplingLoop(gateway, model).start(user_metadata={"user": "bob"}))
    sample = first.ask(0, [1, 2]).json()
    sampled(first.poll(sample))
    view = gateway.get(f"/sessions/{sample['sample_sequence_ids'][0].partition('.')[0]}").json()
    assert view["user"] == "ann"
    copied = {"source_path": f"tinker://{second.model_id}/weights/best", "session_id": second.session_id}
    assert second.post("copy_weights", copied | {"model_seq_id": 7}).status_code == 200
    with backends.gateway(tinker={"session_retention_s": 0.1}):
        assert (
            second.post(f"sessions/{second.session_id}/finish", {"reason": {"type": "success"}}).json() == {}
        )
        wait_until(lambda: not gateway.redis.exists(keys.client_session(second.session_id)))
    assert left(second), "its named weights have outlasted it"

    assert gateway.call("DELETE", "/admin/users/ann/data").status_code == 403
    told = gateway.call("DELETE", "/admin/users/ann/data", key=ADMIN_KEY).json()
    assert told["deleted"] == {"sessions": 1, "turns": 1, "rewards": 0, "client_sessions": 1}
    assert (left(first), left(second)) == (set(), set())
    assert left(other), "another user keeps what is his"
    again = gateway.call("DELETE", "/admin/users/ann/data", key=ADMIN_KEY).json()
    assert again["deleted"] == {"sessions": 0, "turns": 0, "rewards": 0, "client_sessions": 0}
    begun = first.post("create_session", {"tags": [], "sdk_version": "0.38.0"} | ann)
    assert begun.status_code == 410
    wrong = first.post("create_session", {"tags": [], "user_metadata": {"user": "no name"}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "user_metadata")


def test_no_model_comes_back_to_a_user_who_is_deleted_meanwhile(
    backends: Backends, gateway: RunningGateway, trainer: ScriptedTrainer
) -> None:
    loop = trained(SamplingLoop(gateway, str(backends.model_path)).start(user_metadata={"user": "ann"}))
    assert loop.post(f"sessions/{loop.session_id}/finish", {"reason": {"type": "success"}}).status_code == 200
    records, told = keys.client_records_of_user("ann"), []

    def delete_user(gone: int) -> None:
        """As soon as the model has outlasted its session."""
        told.append((gone, loop.model_id.encode() in set[Any](gateway.redis.smembers(records))))
        reply = gateway.call("DELETE", "/admin/users/ann/data", key=ADMIN_KEY, timeout=120)
        assert reply.status_code == 200

    asyncio.run(removing(loop, FORGET_MODEL, delete_user, lambda removal: removal.forget_old(0.0)))
    assert told == [(0, True)]
    assert (left(loop), gateway.redis.exists(records)) == (set(), 0), "nothing has the name of the user"
