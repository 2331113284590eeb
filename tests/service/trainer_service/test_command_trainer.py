"""The loop of a trainer by commands: what it frees, ends, refuses, publishes, and does not try again."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis.command_log import CommandReader
from rollout_queue.trainer_commands import (
    Command,
    CommandFailed,
    Created,
    CreateModel,
    LoadWeights,
    LoraSpec,
    Refused,
    Result,
    Saved,
    SaveForSampler,
    SaveWeights,
    Stepped,
    WeightsLoaded,
)
from tests.support.long_cases import cases
from tests.support.queue.memory_stream import MemoryStream
from tests.support.trainer_service.command_harness import (
    FULL,
    CommandHarness,
    MakeCommandHarness,
    created,
    learn,
    step,
)
from tests.support.trainer_service.command_log import Killed, MemoryCommandLog
from tests.support.trainer_service.harness import FakeGateway
from tests.support.trainer_service.publications import InlineExecutor
from trainer_service.commands.command_trainer import MOST_ENDS
from trainer_service.commands.sampler_weights import NotPublished, WrittenAdapter
from trainer_service.commands.saved_models import SAFE_NAME, safe_name
from trainer_service.commands.serving import GatewayPublications
from trainer_service.heartbeat import Heartbeat
from trainer_service.publishing.gateway_client import GatewayClient
from trainer_service.publishing.places import DiskPlace
from trainer_service.publishing.publisher import Publisher, VersionNumbers
from trainer_service.shared_state import SharedState
from trainer_service.storage.durable_files import DiskRetry
from trainer_service.storage.policy_store import PolicyStore, manifest_sha256
from trainer_service.storage.run_state import VersionFile
from trainer_service.trainer_metrics import TrainerMetrics


def failed(result: Result, category: str = "user") -> str:
    assert isinstance(result, CommandFailed), result
    assert result.category == category
    return result.error


def kept(harness: CommandHarness) -> list[tuple[str, int]]:
    return [(each.model_id, each.number) for each in harness.log.kept]


def test_the_log_in_memory_is_a_log() -> None:
    log: CommandReader = MemoryCommandLog()
    assert not log.read("0-0", 1, 0)


def test_a_checkpoint_frees_what_every_model_contains(make_command_harness: MakeCommandHarness) -> None:
    harness = make_command_harness(checkpoint_every_steps=1)
    for model_id, command in (("a", created()), ("b", created()), ("a", learn(1)), ("b", learn(2))):
        harness.send(model_id, command)
    assert len(kept(harness)) == 4, "no checkpoint contains them"
    harness.send("a", step())
    assert kept(harness) == [("a", 1), ("b", 1), ("a", 2)], "the gradient of b is in no checkpoint"
    harness.send("b", step())
    assert kept(harness) == []


def test_a_log_that_is_half_full_makes_a_checkpoint_that_frees_something(
    make_command_harness: MakeCommandHarness, tmp_path: Path
) -> None:
    harness = make_command_harness()
    harness.send("a", created())
    harness.send("a", learn(1))
    harness.log.bytes = (501, 1000)
    harness.trainer.run_once()
    harness.trainer.run_once()  # the checkpoint is durable now
    assert kept(harness) == [("a", 1)]
    tags = sorted((tmp_path / "run" / "checkpoints").glob("*-step-*"))
    harness.trainer.run_once()
    assert sorted((tmp_path / "run" / "checkpoints").glob("*-step-*")) == tags, (
        "another one would free nothing"
    )


def test_a_model_that_has_ended_is_removed_and_fails(
    make_command_harness: MakeCommandHarness,
) -> None:
    harness = make_command_harness()
    harness.make_step("a")
    harness.log.ends["a"] = "its session has ended"
    assert failed(harness.send("a", learn(2))) == "model a has ended: its session has ended"
    assert harness.trainer.executor.model_ids == set()
    harness.send("b", FULL)
    after = make_command_harness(log=harness.log)
    after.trainer.run_once()
    assert after.trainer.executor.model_ids == {"b"}
    assert isinstance(after.log.last("a:0"), Created), "a command with a result keeps it"


@pytest.mark.parametrize("checkpoints", [0, 1], ids=["no checkpoint", "a checkpoint without it"])
def test_a_trainer_that_was_killed_learns_again_that_a_model_has_ended(
    make_command_harness: MakeCommandHarness, checkpoints: int
) -> None:
    """The last checkpoint has the model; the process that removed it dies before, or after, the next one."""
    first = make_command_harness(checkpoint_every_steps=1)
    first.make_step("a")
    first.trainer.save_if_outdated()
    log = first.log
    late = log.append("a", learn(2))
    log.ends["a"] = "its session has ended"
    log.answers_until_killed = checkpoints
    if checkpoints:
        first.trainer.run_once()
        first.trainer.save_if_outdated()
    else:
        with pytest.raises(Killed):
            first.trainer.run_once()
    log.answers_until_killed = None
    last = log.append("a", learn(3))
    after = make_command_harness(log=log)
    after.trainer.run_once()
    assert after.trainer.executor.model_ids == set()
    for request in (late, last):
        assert failed(log.last(request)) == "model a has ended: its session has ended"
        assert len(log.results[request]) == 1


def test_a_checkpoint_is_made_when_every_model_has_ended(make_command_harness: MakeCommandHarness) -> None:
    harness = make_command_harness()
    harness.send("a", created())
    harness.log.ends["a"] = "its session has ended"
    harness.send("a", step())
    harness.trainer.save_if_outdated()
    assert kept(harness) == []
    after = make_command_harness(log=harness.log)
    assert after.trainer.executor.model_ids == set()


def test_a_pass_that_ends_processes_fails_at_last_and_adds_nothing(
    make_command_harness: MakeCommandHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    log = MemoryCommandLog()
    first = make_command_harness(log=log)
    for command in (created(), learn(1)):
        first.send("a", command)
    too_large = log.append("a", learn(2))
    for _ in range(MOST_ENDS):
        harness = make_command_harness(log=log)
        passes: Iterator[Callable[..., object]] = iter([harness.ranks.run, killed])  # learn(1) is repeated
        monkeypatch.setattr(harness.ranks, "run", lambda *given, of=passes: next(of)(*given))
        with pytest.raises(Killed):
            harness.trainer.run_once()
    after = make_command_harness(log=log)
    after.trainer.run_once()
    assert "ended 3 times" in failed(log.last(too_large), "server")
    alone = make_command_harness("alone")
    for command in (created(), learn(1)):
        alone.send("a", command)
    assert after.send("a", step()) == alone.send("a", step())


class SilentLog(MemoryCommandLog):
    """Takes one answer, and tells the trainer to stop at the second."""

    harness: CommandHarness

    def answer(self, command: Any, result: Result) -> None:
        if not self.results:
            super().answer(command, result)
            return
        self.harness.shared_state.stop()
        raise StorageUnavailable("Redis is away")


def test_no_checkpoint_has_a_command_without_answer(
    make_command_harness: MakeCommandHarness, tmp_path: Path
) -> None:
    log = SilentLog()
    log.harness = harness = make_command_harness(log=log)
    log.append("a", created())
    log.append("b", created())
    harness.trainer.run()
    assert not list((tmp_path / "run" / "checkpoints").glob("*-step-*"))


def test_a_trainer_that_is_told_to_stop_saves_everything(make_command_harness: MakeCommandHarness) -> None:
    harness = make_command_harness()
    harness.make_step("a")
    harness.stop()
    assert kept(harness) == []
    again = make_command_harness(log=harness.log)
    assert again.trainer.step == 1
    assert again.send("a", learn(2)) == harness.send("a", learn(2))


def test_a_name_is_saved_once_or_overwritten(
    make_command_harness: MakeCommandHarness, tmp_path: Path
) -> None:
    harness = make_command_harness(checkpoint_every_steps=1)
    for model_id, command in (("late", created()), ("late", learn(1)), ("a/1", created())):
        harness.send(model_id, command)
    assert isinstance(harness.send("a/1", SaveWeights("x")), Saved)
    assert "a/1 has a checkpoint x already" in failed(harness.send("a/1", SaveWeights("x")))
    harness.send("a/1", learn(1))
    harness.send("a/1", step())
    harness.send("a/1", SaveWeights("x", overwrite=True))
    (name,) = (tmp_path / "run" / "checkpoints" / "saved").glob("*/x")
    harness.send("a/1", learn(2))
    harness.send("a/1", step())
    assert len(list(name.iterdir())) == 2, "a replay of the late model's commands could ask for the first one"
    harness.send("late", step())
    assert len(list(name.iterdir())) == 1
    assert harness.send("b", LoadWeights("a/1", "x", True)) == WeightsLoaded()
    assert harness.passed("b", learn(2)) == after_one_step(make_command_harness).passed("m", learn(2))


def test_a_saved_checkpoint_that_was_damaged_is_refused_and_the_model_goes_on(
    make_command_harness: MakeCommandHarness, tmp_path: Path
) -> None:
    harness = make_command_harness()
    harness.make_step("m", SaveWeights("x"))
    (saved,) = (tmp_path / "run" / "checkpoints" / "saved").glob("*/x/*")
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert len(files) >= 3
    for path in files:
        whole = path.read_bytes()
        middle = len(whole) // 2
        for damaged in (whole[:-1], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
            path.write_bytes(damaged)
            refused = failed(harness.send("m", LoadWeights("m", "x", True)))
            assert "checkpoint x of m cannot be read" in refused
        path.unlink()
        assert "checkpoint x of m cannot be read" in failed(harness.send("b", LoadWeights("m", "x", True)))
        path.write_bytes(whole)
    after = harness.passed("m", learn(2))
    assert after == after_one_step(make_command_harness).passed("m", learn(2))
    assert harness.send("b", LoadWeights("m", "x", True)) == WeightsLoaded()


def after_one_step(make_command_harness: MakeCommandHarness) -> CommandHarness:
    harness = make_command_harness("one-step")
    harness.make_step("m")
    return harness


def test_a_loaded_model_has_its_optimizer_only_if_asked_for(
    make_command_harness: MakeCommandHarness,
) -> None:
    results = {}
    for optimizer in (True, False):
        harness = make_command_harness(f"optimizer-{optimizer}")
        harness.make_step("m", SaveWeights("x"), LoadWeights("m", "x", optimizer))
        results[optimizer] = [harness.send("m", each) for each in (learn(2), step(), learn(3))]
    kept_on = after_one_step(make_command_harness)
    alone = [kept_on.send("m", each) for each in (learn(2), step(), learn(3))]
    assert results[True] == alone
    assert results[False][:2] == alone[:2], "the weights, and so the gradient, are the same"
    assert results[False][2] != alone[2]


@pytest.mark.parametrize(
    ("stage", "dtype"), cases([(2, "float32"), (1, "bfloat16")], long=[(0, "float32"), (1, "float32")])
)
def test_a_model_with_all_weights_is_saved_loaded_and_restored(
    make_command_harness: MakeCommandHarness, stage: int, dtype: str
) -> None:
    harness = make_command_harness(zero_stage=stage, dtype=dtype)
    for command in (FULL, learn(1), step(), SaveWeights("x"), learn(2)):
        harness.send("m", command)
    later = [harness.send("m", each) for each in (step(), learn(3))]
    harness.send("m", LoadWeights("m", "x", True))
    assert [harness.send("m", each) for each in (learn(2), step(), learn(3))][1:] == later
    harness.send("m", LoadWeights("m", "x", True))
    harness.stop()
    after = make_command_harness(log=harness.log, zero_stage=stage, dtype=dtype)
    assert [after.send("m", each) for each in (learn(2), step(), learn(3))][1:] == later


def test_a_gradient_is_dropped_when_weights_are_loaded(make_command_harness: MakeCommandHarness) -> None:
    harness = make_command_harness()
    for command in (created(), SaveWeights("x"), learn(1), LoadWeights("m", "x", True)):
        harness.send("m", command)
    assert harness.send("m", step()) == Stepped({"grad_norm": 0.0})


REFUSED: dict[str, tuple[Command, str]] = {
    "gateway": (Refused("too many tokens"), "too many tokens"),
    "base": (CreateModel("other/model", LoraSpec(4)), "trains base, and not other/model"),
    "rank": (CreateModel("base", LoraSpec(0)), "rank of an adapter must be at least 1"),
    "layers": (created(train_mlp=False, train_attn=False, train_unembed=False), "no layer is trained"),
    "full": (FULL, "1 adapters of this trainer's model are trained"),
    "gone": (learn(1), "there is no model new"),
    "step": (step(), "there is no model new"),
    "sampler": (SaveForSampler("s"), "there is no model new"),
}


def test_a_model_that_cannot_be_is_refused(make_command_harness: MakeCommandHarness) -> None:
    harness = make_command_harness()
    harness.send("m", created())
    for case, (command, sentence) in REFUSED.items():
        assert sentence in failed(harness.send("new", command)), case
        assert harness.trainer.executor.model_ids == {"m"}, case


def test_a_checkpoint_of_another_shape_is_refused(make_command_harness: MakeCommandHarness) -> None:
    harness = make_command_harness()
    for command in (created(rank=2), SaveWeights("x")):
        harness.send("small", command)
    harness.send("large", created(rank=8, train_mlp=False))
    error = failed(harness.send("large", LoadWeights("small", "x", True)))
    assert "rank 2 for attn, mlp, unembed, and the model an adapter of rank 8 for attn, unembed" in error
    assert isinstance(harness.send("large", learn(1)), type(harness.send("small", learn(1))))


def test_names_of_models_are_safe_and_differ() -> None:
    ids = ["a", "a/b", "a:b", "a-b", "..", "ä", "x" * 64, "x" * 65, "x" * 66, "0b6e:train:0"]
    names = [safe_name(each) for each in ids]
    assert len(set(names)) == len(ids)
    assert all(SAFE_NAME.fullmatch(each) for each in names)
    assert safe_name("a") == "a"


ADAPTER = WrittenAdapter("math", 3, "file:///adapters/math/v00000003", "ab" * 32)
Answer = Callable[[httpx.Request], httpx.Response]


class AdapterGateway(FakeGateway):
    """Also has the route of adapters."""

    def __init__(self, *answers: httpx.Response) -> None:
        super().__init__()
        self.asked: list[Any] = []
        self._answers = list(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/admin/adapters":
            return super().__call__(request)
        self.asked.append(httpx.Response(200, content=request.content).json())
        return self._answers.pop(0)


def publications(root: Path, gateway: FakeGateway) -> tuple[GatewayPublications, PolicyStore]:
    heartbeat = Heartbeat(stream := MemoryStream(), SharedState(), retry_s=0.01)
    client = GatewayClient(httpx.Client(transport=httpx.MockTransport(gateway), base_url="http://g"), 1.0)
    (root / "base").mkdir(parents=True)
    store, metrics = PolicyStore(root / "policies", root / "base", 4), TrainerMetrics(CollectorRegistry())
    place, disk = DiskPlace(store), DiskRetry(heartbeat, metrics, "publishing", "publish")
    publisher = Publisher(store, client, stream, place, heartbeat, metrics, InlineExecutor())
    numbers = VersionNumbers(VersionFile(root), publisher, disk)
    return GatewayPublications(client, heartbeat, publisher, numbers, store, place, 0), store


def told(status: int, *results: dict[str, Any]) -> httpx.Response:
    return httpx.Response(
        status, json={"name": "math", "version": 3, "model": "policy:math@3", "results": results}
    )


LOADED = {"server": "r0", "ok": True}
BROKEN = {"server": "r1", "ok": False, "error": "rank 64 is too large", "refused": True}
STARTING = {"server": "r0", "ok": False, "error": "the engine does not run"}


def test_an_adapter_is_published_when_one_server_has_it(tmp_path: Path) -> None:
    """Before that, the gateway is away, then no server is live, and then an engine starts."""
    away = httpx.Response(503, json={"error": {"message": "Redis is away"}})
    gateway = AdapterGateway(away, told(200), told(207, BROKEN, STARTING), told(207, BROKEN, LOADED))
    publications(tmp_path, gateway)[0].adapter(ADAPTER)
    assert gateway.asked == [asdict(ADAPTER) | {"passing": True}] * 4


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (told(207, BROKEN), "no server has loaded math: rank 64 is too large"),
        (
            httpx.Response(409, json={"error": {"message": "math has had version 3"}}),
            "the gateway refuses math: math has had version 3",
        ),
    ],
    ids=["no server takes it", "the version has other content"],
)
def test_an_adapter_that_is_refused_is_not_published(
    tmp_path: Path, answer: httpx.Response, why: str
) -> None:
    with pytest.raises(NotPublished, match=why):
        publications(tmp_path, AdapterGateway(answer))[0].adapter(ADAPTER)


def test_all_weights_are_the_next_version(tmp_path: Path, make_command_harness: MakeCommandHarness) -> None:
    harness, gateway = make_command_harness(), AdapterGateway()
    for command in (FULL, learn(1), step()):
        harness.send("m", command)
    publishing, store = publications(tmp_path / "published", gateway)
    for version in (1, 2):
        published = publishing.weights(harness.ranks, "m", step=version)
        path = store.path_of(version)
        assert (published.policy, published.version) == ("", version)
        assert published.location == path.resolve().as_uri()
        assert published.manifest_sha256 == manifest_sha256(path)
        assert published.size_bytes == store.size_of(version) > 0
    assert [each["version"] for each in gateway.announced] == [1, 2]
    gateway.server_ok = False
    with pytest.raises(NotPublished, match="no server has loaded version 3"):
        publishing.weights(harness.ranks, "m", step=3)
