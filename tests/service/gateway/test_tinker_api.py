"""The Tinker SDK's commands over HTTP: durable before they are promised, carried out once and in order."""

import random
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import zstandard

from gateway.tinker import messages_pb2 as wire
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.trainer_commands import CreateModel, ForwardBackward, LoraSpec, OptimStep, Refused
from tests.support.gateway.polls import polled
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer, scripted_trainer
from tests.support.gateway.tinker_loop import ADAM, ONE, TinkerLoop, datum, passed, tensor
from tests.support.waiting import wait_until


@pytest.fixture
def loop(gateway: RunningGateway, backends: Backends) -> TinkerLoop:
    loop = TinkerLoop(gateway, str(backends.model_path))
    loop.begin()
    return loop


def test_a_step_from_the_first_request_to_the_result(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    promise = loop.pass_(1, ONE, datum([5], [6], weights=[1.0])).json()
    logprobs, metrics = passed(loop.poll(promise))
    assert [pytest.approx(each) for each in logprobs] == [[-0.002, -0.003, -0.007], [-0.006]]
    assert metrics == {"loss:sum": pytest.approx(0.018)}
    stepped = loop.done("optim_step", 2, adam_params=ADAM)
    assert stepped["metrics"] == {"grad_norm": 1.5, "learning_rate": 0.001}
    commands = [each.command for each in trainer.seen]
    assert commands[0] == CreateModel(loop.base_model, LoraSpec(8))
    assert isinstance(commands[1], ForwardBackward)
    assert list(commands[1].data[0].numbers["weights"]) == [0.0, 1.0, -2.5]
    assert commands[2] == OptimStep(0.001, 0.9, 0.95, 1e-12, 0.0, 0.0)


def test_a_command_that_comes_again_is_carried_out_once(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    again = [loop.command("optim_step", 1, adam_params=ADAM).json() for _ in range(4)]
    assert len({each["request_id"] for each in again}) == 1
    assert len({loop.poll(each).text for each in again}) == 1, "its promise is read many times"
    assert loop.create() == loop.create(), "create_model, too"
    other = loop.command("optim_step", 1, adam_params=ADAM | {"learning_rate": 0.5})
    assert (other.status_code, other.json()["error"]["code"]) == (400, "sequence_conflict")
    loop.done("optim_step", 2, adam_params=ADAM)
    assert [each.number for each in trainer.seen] == [0, 1, 2]


def test_commands_that_come_early_wait(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    late = [loop.command("optim_step", number, adam_params=ADAM).json() for number in (4, 2, 3)]
    loop.pass_(1, ONE)
    assert all("metrics" in loop.poll(each).json() for each in late)
    assert [each.number for each in trainer.seen] == [0, 1, 2, 3, 4]


def test_a_poll_is_held_until_the_trainer_answers(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    trainer.go_on.clear()
    promise = loop.command("optim_step", 1, adam_params=ADAM).json()
    found: list[Any] = []
    polling = threading.Thread(target=lambda: found.append(loop.poll(promise)))
    polling.start()
    wait_until(lambda: trainer.reader.held_bytes()[0] > 0)
    assert not found
    trainer.go_on.set()
    polling.join(timeout=300)
    assert found[0].json()["metrics"]["grad_norm"] == 1.5


def test_a_poll_without_a_result_is_told_to_ask_again(backends: Backends, gateway: RunningGateway) -> None:
    with backends.gateway(tinker={"poll_s": 0.05}) as quick:
        loop = TinkerLoop(quick, str(backends.model_path))
        promise = loop.begin()
        told = loop.poll(promise)
    assert (told.status_code, told.json()) == (
        200,
        {"type": "try_again", "request_id": promise["request_id"], "queue_state": "active"},
    )


@pytest.fixture(params=["the setting", "a small Redis"])
def log_bytes(request: pytest.FixtureRequest, gateway: RunningGateway) -> Iterator[int]:
    """What the log may hold: `max_log_bytes`, or an eighth of what Redis may use."""
    if request.param == "the setting":
        yield 2**20
        return
    gateway.redis.config_set("maxmemory", 2**25)
    yield 2**22
    gateway.redis.config_set("maxmemory", 0)


def test_a_full_log_is_told_as_capacity(backends: Backends, gateway: RunningGateway, log_bytes: int) -> None:
    bound = {"max_log_bytes": log_bytes} if log_bytes == 2**20 else {}
    tokens = 20_000 * log_bytes // 2**20
    with backends.gateway(tinker={"poll_s": 0.05} | bound) as small:
        polled()
        loop, other = (TinkerLoop(small, str(backends.model_path)) for _ in range(2))
        loop.begin()
        waiting = other.begin()
        large = datum([1] * tokens, [2] * tokens, weights=[1.0] * tokens)
        said = [loop.pass_(number, large).status_code for number in range(1, 12)]
        assert said == [200] * 11, "the model of the oldest command goes on, up to twice the bound"
        refused = other.pass_(1, large)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "log_full")
        assert refused.headers["retry-after"] == "2"
        assert small.refusals == {"log_full": 1}
        assert other.command("optim_step", 2, adam_params=ADAM).status_code == 200, "a small one"
        told = other.poll(waiting).json()
        assert (told["queue_state"], "queue_state_reason" in told) == ("paused_capacity", True)
        with scripted_trainer(gateway.redis) as trainer:
            for number in range(12, 40):
                assert loop.pass_(number, large).status_code == 200
            wait_until(lambda: len(trainer.seen) >= 41)
        failed = [each.command.error for each in trainer.seen if isinstance(each.command, Refused)]
        assert failed
        assert set(failed) == {
            f"the data of one optimizer step need more than the command log holds ({log_bytes} bytes)"
        }


def test_data_that_contradict_themselves_fail_the_promise_and_use_up_the_number(
    loop: TinkerLoop, trainer: ScriptedTrainer
) -> None:
    image = wire.Datum()
    image.model_input.add().image.data = b"png"
    shapes = datum([1, 2], [3, 4])
    shapes.loss_fn_inputs["weights"].CopyFrom(tensor(array("f", [1.0]), [1]))
    floats = datum([1], [2])
    floats.loss_fn_inputs["target_tokens"].CopyFrom(tensor(array("f", [1.0]), [1]))
    sparse = datum([1, 2], [3, 4])
    sparse.loss_fn_inputs["weights"].sparse_csr.values = array("f", [1.0]).tobytes()
    sparse.loss_fn_inputs["weights"].shape.extend([2, 1])
    sparse.loss_fn_inputs["weights"].dtype = wire.DTYPE_FLOAT32
    two = datum([1], [2])
    two.loss_fn_inputs["target_tokens"].CopyFrom(tensor(array("q", [2, 3]), [1, 2]))
    broken = [
        ([image], "chunks of kind image are not served"),
        ([datum([1, 2000], [2, 3])], "a token id lies outside the vocabulary"),
        ([datum([1, -1], [2, 3])], "a token id lies outside the vocabulary"),
        ([datum([1], [1024])], "data[0].target_tokens: a token id lies outside the vocabulary"),
        ([ONE, datum([], [])], "data[1].model_input: there is no token"),
        ([datum([1], [2], weights=[float("nan")])], "weights: value 0 is nan"),
        ([shapes], "data[0].weights: shape [1] for 2 tokens"),
        ([floats], "token ids are whole numbers"),
        ([sparse], "the indices of the sparse tensor contradict its shape"),
        ([ONE, two], "targets of [1, 2] for a position"),
        ([], "there is no datum"),
    ]
    for number, (datums, why) in enumerate(broken, 1):
        told = loop.poll(loop.pass_(number, *datums).json()).json()
        assert told["category"] == "user"
        assert why in told["error"]
    assert "metrics" in loop.done("optim_step", len(broken) + 1, adam_params=ADAM)


def test_tensors_of_every_kind_mean_the_same(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    soft = datum([1, 2], [3, 4])
    targets = wire.Tensor(dtype=wire.DTYPE_INT64, shape=[2, 3])
    targets.sparse_csr.values = array("q", [7, 8]).tobytes()
    targets.sparse_csr.crow_indices = array("q", [0, 1, 2]).tobytes()
    targets.sparse_csr.col_indices = array("q", [2, 0]).tobytes()
    soft.loss_fn_inputs["target_tokens"].CopyFrom(targets)
    half = b"".join(array("f", [value]).tobytes()[2:] for value in (0.5, 1.0, -2.0, 0.0, 4.0, 1.5))
    soft.loss_fn_inputs["weights"].CopyFrom(wire.Tensor(dense=half, dtype=wire.DTYPE_BFLOAT16, shape=[2, 3]))
    flat = datum([1, 2], [3, 4], weights=[1.0, 1.0])
    flat.loss_fn_inputs["target_tokens"].ClearField("shape")
    narrow = datum([1, 2], [3, 4])
    narrow.loss_fn_inputs["target_tokens"].CopyFrom(tensor(array("i", [3, 4]), [2]))
    for number, each in enumerate((soft, flat, narrow), 1):
        passed(loop.poll(loop.pass_(number, each).json()))
    commands = [each.command for each in trainer.seen if isinstance(each.command, ForwardBackward)]
    first = commands[0].data[0]
    assert (list(first.targets), first.k) == ([0, 0, 7, 8, 0, 0], 3)
    assert list(first.numbers["weights"]) == [0.5, 1.0, -2.0, 0.0, 4.0, 1.5]
    assert [list(each.data[0].targets) for each in commands[1:]] == [[3, 4], [3, 4]]


def test_settings_of_the_loss_keep_their_kind(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    both = {"a": wire.LossConfigValue(number=0.5), "b": wire.LossConfigValue(text="x")}
    loop.poll(loop.pass_(1, ONE, loss="ppo", loss_fn_config={"a": 9.0}, loss_fn_config_v2=both).json())
    loop.poll(loop.pass_(2, ONE, loss="ppo", loss_fn_config={"a": 9.0}, forward_only=True).json())
    told = loop.poll(loop.pass_(3, ONE, loss="ppo", loss_fn_config={"a": float("inf")}).json()).json()
    assert "a is inf" in told["error"]
    first, second = (each.command for each in trainer.seen[1:3])
    assert isinstance(first, ForwardBackward)
    assert isinstance(second, ForwardBackward)
    assert (first.config, first.forward_only) == ({"a": 0.5, "b": "x"}, False)
    assert (second.config, second.forward_only) == ({"a": 9.0}, True)


def test_a_compressed_body_is_the_same_command(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    request = wire.ForwardBackwardRequest(model_id=loop.model_id, seq_id=1, data=[ONE], loss_fn="ppo")
    body = request.SerializeToString()
    packed = loop.send(zstandard.compress(body), **{"content-encoding": "zstd"})
    assert packed.json() == loop.send(body).json()
    assert loop.send(b"no zstd", **{"content-encoding": "zstd"}).status_code == 400
    assert loop.send(body, **{"content-encoding": "br"}).status_code == 415
    assert loop.send(body, **{"content-type": "application/json"}).status_code == 415
    bomb = zstandard.compress(bytes(200 * 2**20))
    assert loop.send(bomb, **{"content-encoding": "zstd"}).status_code == 413


def test_whether_the_head_is_trained_is_told(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    for trained in (True, False):
        loop.poll(loop.begin({"rank": 8, "train_unembed": trained}))
        saved = loop.done("save_weights", 1, path="first")
        info = loop.post("weights_info", {"tinker_path": saved["path"]}).json()
        assert info["train_unembed"] is trained


def test_checkpoints_and_what_is_loaded_of_them(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    saved = loop.done("save_weights", 1, path="first")
    assert saved == {"path": f"tinker://{loop.model_id}/weights/first", "type": "save_weights"}
    info = loop.post("weights_info", {"tinker_path": saved["path"]}).json()
    assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == (loop.base_model, 8, True)
    into = {"session_id": loop.session_id, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    loaded = loop.poll(loop.post("load_weights", into).json()).json()
    other = f"{loop.session_id}:train:1"
    assert loaded == {"path": saved["path"], "model_id": other, "type": "load_weights"}
    assert loop.post("get_info", {"model_id": other}).json()["lora_rank"] == 8
    back = loop.done("load_weights", 2, path=saved["path"], optimizer=False)
    assert back["model_id"] == loop.model_id
    for path in ("first", "tinker://a/b/c/d", f"tinker://{loop.model_id}/sampler_weights/first"):
        assert loop.command("load_weights", 3, path=path, optimizer=True).status_code == 400
    missing = f"tinker://{loop.model_id}/weights/none"
    assert loop.post("weights_info", {"tinker_path": missing}).status_code == 404
    for name in ("a/b", "", "~1", "x" * 200):
        assert loop.command("save_weights", 3, path=name).status_code == 400


def test_weights_to_sample_from_have_a_path_or_a_sampling_session(
    loop: TinkerLoop, trainer: ScriptedTrainer
) -> None:
    named = loop.done("save_weights_for_sampler", 1, path="v1")
    assert named["path"] == f"tinker://{loop.model_id}/sampler_weights/v1"
    short = loop.command("save_weights_for_sampler", 2, sampling_session_seq_id=0, kind="inflight").json()
    assert loop.poll(short).json()["sampling_session_id"] == f"{loop.session_id}:sample:0"
    again = loop.command("save_weights_for_sampler", 2, sampling_session_seq_id=1, kind="inflight")
    assert again.json() == short, "the SDK counts its sampling sessions on when an answer was lost"
    assert loop.poll(again.json()).json()["sampling_session_id"] == f"{loop.session_id}:sample:0"
    assert loop.command("save_weights_for_sampler", 2, path="other").status_code == 400
    for body in ({}, {"path": "a", "sampling_session_seq_id": 1}):
        assert loop.command("save_weights_for_sampler", 3, **body).status_code == 400


def test_another_key_reaches_nothing(
    loop: TinkerLoop, gateway: RunningGateway, trainer: ScriptedTrainer
) -> None:
    promise = loop.command("optim_step", 1, adam_params=ADAM).json()
    saved = loop.done("save_weights", 2, path="mine")
    other = loop.of_another_key()
    assert other.poll(promise).status_code == 404
    assert other.command("optim_step", 3, adam_params=ADAM).status_code == 404
    assert other.pass_(3, ONE).status_code == 404
    assert other.post("get_info", {"model_id": loop.model_id}).status_code == 404
    assert other.post("session_heartbeat", {"session_id": loop.session_id}).status_code == 404
    assert other.post("weights_info", {"tinker_path": saved["path"]}).status_code == 404
    steal = {"session_id": loop.session_id, "model_seq_id": 7, "base_model": loop.base_model}
    assert other.post("create_model", steal).status_code == 404
    assert TinkerLoop(gateway, "", "tml-nobody").post("create_session", {}).status_code == 401
    assert TinkerLoop(gateway, "", "").post("create_session", {}).status_code == 401
    assert "metrics" in replace(loop, key=f"tml-{ADMIN_KEY}").poll(promise).json()


def test_promises_that_are_none_and_bytes_that_are_no_message(
    loop: TinkerLoop, trainer: ScriptedTrainer
) -> None:
    assert loop.poll({"request_id": f"c:{loop.model_id}:9"}).status_code == 410
    for text in ("", "c:", "x:y:1", "c:nobody:1", f"c:{loop.model_id}:-1"):
        assert loop.poll({"request_id": text}).status_code == 404
    assert loop.poll({"request_id": "x" * 301}).status_code == 400
    for body in (b"", b"\xff\xff", b"\x0a\x05abc", b"\x12\x00" * 50):
        refused = loop.send(body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), body


def test_a_model_that_is_not_served_or_was_made_otherwise_is_refused(
    loop: TinkerLoop, gateway: RunningGateway
) -> None:
    body = {"session_id": loop.session_id, "model_seq_id": 0, "base_model": loop.base_model}
    assert loop.post("create_model", body | {"base_model": "another/model"}).status_code == 400
    again = loop.post("create_model", body | {"lora_config": {"rank": 16}})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "model_seq_id")
    for wrong in ({"optimizer_config": {"type": "dimuon"}}, {"lora_config": {"rank": 0}}, {"colour": "red"}):
        refused = loop.post("create_model", body | wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(next(iter(wrong)))
    assert loop.post("create_model", body | {"session_id": "run-none"}).status_code == 404
    for report, status in ((TrainerReport(source="turns"), 400), (TrainerReport(source="commands"), 200)):
        gateway.redis.hset(key_names.TRAINER, "source", report.fields()["source"])
        answer = loop.post("create_model", body | {"model_seq_id": 1})
        assert answer.status_code == status, "a trainer that learns from turns takes no models"
        assert status == 200 or answer.json()["error"]["code"] == "trainer_source"


def test_the_models_of_a_finished_session_take_no_more_commands(
    loop: TinkerLoop, trainer: ScriptedTrainer
) -> None:
    beat = {"session_id": loop.session_id}
    assert loop.post("session_heartbeat", beat).status_code == 200
    loop.command("optim_step", 5, adam_params=ADAM)  # it waits for those before it
    assert loop.poll(loop.create()).status_code == 200  # the trainer has answered
    held = trainer.reader.held_bytes()[0]
    assert loop.finish() == 200
    assert trainer.reader.held_bytes()[0] < held, "what waited is gone"
    assert loop.command("optim_step", 1, adam_params=ADAM).status_code == 404
    assert trainer.reader.ended([loop.model_id]) == {loop.model_id: "its client session has finished"}
    assert loop.finish("errored", detail="later") == 200
    assert loop.post("session_heartbeat", beat).status_code == 410
    assert loop.finish("tired") == 400


def test_the_models_of_a_silent_session_end(backends: Backends, gateway: RunningGateway) -> None:
    loop = TinkerLoop(gateway, str(backends.model_path))
    loop.begin()
    with backends.gateway(tinker={"session_timeout_s": 0.2}) as impatient:
        wait_until(lambda: impatient.redis.hexists(key_names.model(loop.model_id), "ended"))
        assert loop.command("optim_step", 1, adam_params=ADAM).status_code == 404


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("optim_step", {"adam_params": ADAM | {"learning_rate": -1.0}}),
    ("optim_step", {"adam_params": ADAM | {"type": "dimuon"}}),
    ("save_weights", {"path": "a/b"}),
    ("save_weights", {"path": "a", "ttl_seconds": 1}),
    ("load_weights", {"path": "nowhere", "optimizer": True}),
    ("load_weights", {"path": "tinker://x/weights/y", "optimizer": True}),
    ("save_weights_for_sampler", {}),
]


def test_a_command_that_is_refused_uses_up_its_number(loop: TinkerLoop, trainer: ScriptedTrainer) -> None:
    """The SDK goes on with the next number, which would wait for ever."""
    for number, (verb, body) in enumerate(REFUSED, 1):
        refused = [loop.command(verb, number, **body) for _ in range(2)]
        assert {each.status_code for each in refused} <= {400, 404}, (verb, body)
    assert "metrics" in loop.done("optim_step", len(REFUSED) + 1, adam_params=ADAM)
    kinds = [type(each.command).__name__ for each in trainer.seen]
    assert kinds == ["CreateModel", *["Refused"] * len(REFUSED), "OptimStep"]


def test_tensors_that_would_be_huge_are_refused_before_they_are_made(
    loop: TinkerLoop, trainer: ScriptedTrainer
) -> None:
    tokens = 20_000
    sparse = datum([1] * tokens, [2] * tokens)
    empty = wire.Tensor(dtype=wire.DTYPE_INT64, shape=[tokens, 4096])
    empty.sparse_csr.crow_indices = array("q", [0] * (tokens + 1)).tobytes()
    sparse.loss_fn_inputs["target_tokens"].CopyFrom(empty)
    told = loop.poll(loop.pass_(1, sparse).json()).json()
    assert "81920000 values, of 16777216 allowed" in told["error"]
    many = [datum([1], [2]) for _ in range(4097)]
    assert "4097 datums, of 4096 allowed" in loop.poll(loop.pass_(2, *many).json()).json()["error"]


def test_what_the_sdk_asks_at_its_start(loop: TinkerLoop, gateway: RunningGateway) -> None:
    begun = loop.post("create_session", {"tags": []}).json()
    assert begun.keys() == {"type", "session_id"}, "there is nothing to warn of"
    config = loop.post("client/config", {"sdk_version": "0.38.0"}).json()
    assert config["pjwt_auth_enabled"] is False
    assert loop.post("client/dynamic_config", {"sdk_version": "0.38.0"}).json()["refresh_interval_sec"] == 300
    assert loop.post("telemetry", {"events": [{"anything": 1}]}).json() == {"status": "accepted"}
    found = loop.get("get_server_capabilities").json()
    (model,) = found["supported_models"]
    assert (model["model_name"], model["trainable"]) == (loop.base_model, True)
    assert model["max_context_length"] > 0
    assert gateway.call("GET", "/api/v1/healthz", key=None).json() == {"status": "ok"}


# Damaged bodies

BODIES = 60


def sound(loop: TinkerLoop, number: int, draw: random.Random) -> bytes:
    """The body of a command that the gateway takes."""
    length = draw.randint(1, 9)
    ids = [draw.randrange(1000) for _ in range(length)]
    made = datum(ids, ids, weights=[draw.uniform(-2, 2) for _ in ids])
    made.loss_fn_inputs["advantages"].CopyFrom(tensor(array("f", [1.0] * length), [length]))
    request = wire.ForwardBackwardRequest(
        model_id=loop.model_id, seq_id=number, data=[made, made], loss_fn="ppo", loss_fn_config={"a": 1.0}
    )
    body: bytes = request.SerializeToString()
    return body


def damaged(body: bytes, draw: random.Random) -> bytes:
    """The body with some bytes changed, cut out, doubled or cut off."""
    data = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + draw.randint(1, 30)]
            case _:
                del data[at + 1 :]
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bodies_are_refused_or_promised(
    loop: TinkerLoop, trainer: ScriptedTrainer, seed: int
) -> None:
    draw = random.Random(seed)
    for number in range(1, BODIES):
        reply = loop.send(damaged(sound(loop, number, draw), draw))
        assert reply.status_code in (200, 400, 404), reply.text
        if reply.status_code == 200:
            assert set(reply.json()) == {"request_id", "model_id"}
    assert loop.gateway.get("/live").status_code == 200


def test_what_a_compressed_body_becomes_counts_as_much_as_a_body(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(max_bodies_bytes_per_key=50_000) as gateway:
        loop = TinkerLoop(gateway, str(backends.model_path))
        loop.begin()
        for size, status in ((100_000, 413), (40_000, 400), (100_000, 413), (40_000, 400)):
            answer = loop.send(zstandard.compress(bytes(size)), **{"content-encoding": "zstd"})
            assert answer.status_code == status, answer.text
