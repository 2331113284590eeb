"""Images on the real engine: the trainer reproduces its logprobs, learns, and serves what it learned."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from safetensors.torch import load_file
from torch import Tensor

from gateway.language.tokenizer_files import tokenizer_of
from rollout_queue.redis import key_names
from tests.support.images import asking, data_url, encoded, image_of, noise_url
from tests.support.redis_clients import redis_at
from tests.support.system.real_system import ADMIN_KEY, System, running_system, system_settings
from tests.support.system.turns import recorded_turns
from tests.support.tiny_vision_model import make_tiny_vision_model
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.images import ImageInputs
from trainer_service.model.packed_attention import packing_of
from trainer_service.rows.rows import Row, micro_batches, planned_rows

pytestmark = pytest.mark.long

SESSIONS, TOKENS = 4, 12
CLOSE = 1e-4
"""In nats. The engine and the trainer compute in float32, in another order."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def seeing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(system_settings(tmp_path_factory.mktemp("system"), model)) as system:
        yield system


@pytest.fixture(scope="module")
def redis(seeing: System) -> Iterator[Redis]:
    with redis_at(f"redis://127.0.0.1:{seeing.settings.redis_port}/0") as redis:
        yield redis


def converse(system: System, ticket: dict[str, Any], number: int) -> None:
    """Two calls. The first shows none, one or two images; the second shows one more."""
    photo = data_url(encoded(image_of(150, 70, number), "JPEG", quality=80), "image/jpeg")
    glass = data_url(encoded(image_of(40, 90, number, "RGBA")))
    firsts = (["what is it?"], ["look", photo], [glass, "and", noise_url(256, 256, number)], ["look", photo])
    calls, history = system.client(ticket).chat.completions, [asking(*firsts[number])]
    for said in (["and", noise_url(64, 96, 7), "this?"], None):
        asked: Any = history
        answer = calls.create(model="policy", messages=asked, max_tokens=TOKENS)
        history.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        history.append(asking(*(said or ["end"])))


def trained_group(system: System) -> list[str]:
    return system.train_group(SESSIONS, lambda ticket, number: converse(system, ticket, number))


def rows_of(redis: Redis, session_id: str) -> list[Row]:
    """The rows that train the session, with the images in the store."""
    turns = recorded_turns(redis, session_id)
    planned = planned_rows(session_id, turns, [turn.turn_id for turn in turns])
    rows: list[Row] = [each.row() for each in planned]
    return [replace(row, images=tuple(stored(redis, each) for each in row.images)) for row in rows]


def repainted(image: Any) -> Any:
    """Another image of the same size."""
    return replace(image, png=encoded(image_of(image.place.width, image.place.height, 99)))


def stored(redis: Redis, image: Any) -> Any:
    return replace(image, png=redis.get(key_names.image(image.place.sha256)))


def difference(directory: Path, rows: list[Row]) -> Tensor:
    """|log p of the trainer with these weights - log p of the engine| of each sampled token, in nats."""
    model = load_model(directory, torch.float32)
    images = ImageInputs(directory, model.config)
    found = []
    for batch in micro_batches(rows, 100_000):
        with torch.no_grad():
            lp_T, *_ = scores(model, batch, packing_of(model), torch.device("cpu"), images=images)
        found.append((lp_T.double() - torch.from_numpy(batch.logprobs_T).double()).abs())
    return torch.cat(found)


@pytest.fixture(scope="module")
def trained(seeing: System) -> list[str]:
    return trained_group(seeing)


def test_the_trainer_reproduces_the_engines_logprobs_of_answers_to_images(
    seeing: System, redis: Redis, model: Path, trained: list[str]
) -> None:
    turns = [recorded_turns(redis, session_id) for session_id in trained]
    assert [[turn.relation for turn in each] for each in turns] == [["root", "extends"]] * SESSIONS
    assert [[len(turn.images) for turn in each] for each in turns] == [[0, 1], [1, 1], [2, 1], [1, 1]]
    rows = [row for session_id in trained for row in rows_of(redis, session_id)]
    gap_T = difference(model, rows)
    print(f"{len(gap_T)} sampled tokens: |d log p| mean {gap_T.mean():.1e}, largest {gap_T.max():.1e}")
    assert gap_T.max() < CLOSE
    others = [replace(row, images=tuple(map(repainted, row.images))) for row in rows]
    assert difference(model, others).max() > 100 * CLOSE, "the images change nothing"
    metrics = seeing.trainer("/status")["metrics"]
    print(f"the trainer's own: {metrics['mismatch/abs_logp']:.1e}")
    assert metrics["mismatch/abs_logp"] < CLOSE


def test_what_was_learned_from_images_is_served(
    seeing: System, redis: Redis, model: Path, trained: list[str]
) -> None:
    second = trained_group(seeing)
    version = recorded_turns(redis, second[0])[0].versions[0].version
    policies = seeing.get("/admin/policies", key=ADMIN_KEY)["data"]
    (location,) = [each["location"] for each in policies if each["version"] == version]
    published = Path(location.removeprefix("file://"))
    gap_T = difference(published, [row for session_id in second for row in rows_of(redis, session_id)])
    print(f"version {version}: largest |d log p| {gap_T.max():.1e}")
    assert gap_T.max() < CLOSE
    before, after = (load_file(path / "model.safetensors") for path in (model, published))
    learned = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert any("visual.patch_embed" in name for name in learned)
    assert any("language_model.layers" in name for name in learned)


def test_sampled_pads_harm_no_engine(seeing: System, redis: Redis, model: Path) -> None:
    pad = tokenizer_of(model).token_to_id("<|image_pad|>")
    ticket = seeing.post("/sessions", {"sampling": {"mode": "allow"}, "train": False})
    calls, history = seeing.client(ticket).chat.completions, [asking("look", noise_url())]
    for biased in ({str(pad): 100}, {}):
        asked: Any = history
        answer = calls.create(model="policy", messages=asked, max_tokens=4, logit_bias=biased)
        history.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        history.append(asking("<|vision_start|><|image_pad|><|vision_end|>", noise_url(seed=5)))
    one, two = recorded_turns(redis, ticket["session_id"])
    assert one.output_ids.tolist() == [pad] * 4
    assert len(two.output_ids) > 0
    assert seeing.rollout()["restarts"] == 0
