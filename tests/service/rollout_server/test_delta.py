"""A version as changes against another one: the files that a server makes of them are the published ones."""

import hashlib
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_queue.contract.published_policy import MANIFEST, FileSpec, TensorSpec
from rollout_server.weights.fetch import apply_delta
from rollout_server.weights.weight_files import BrokenWeights, tensors_of
from tests.support.rollout_server.harness import Harness, hastened, make_harness
from tests.support.rollout_server.weights import (
    SHAPES,
    WEIGHTS,
    Tensors,
    float32_tensors,
    write_model,
    write_safetensors,
)
from tests.support.turned_clock import TurnedClock
from trainer_service.storage.policy_store import PolicyStore, encode, write_delta

TRAINER, PEER = "http://127.0.0.1:8200", "http://peer:8100"
CHANGES = f"{WEIGHTS}.delta"
Words = npt.NDArray[np.uint16]


def bf16(values: Words) -> tuple[str, list[int], bytes]:
    return "BF16", [len(values)], values.tobytes()


def spec_of(path: Path) -> FileSpec:
    content = path.read_bytes()
    return FileSpec(path.name, len(content), hashlib.sha256(content).hexdigest())


def directory_with(directory: Path, tensors: Tensors) -> Path:
    directory.mkdir()
    write_safetensors(directory / WEIGHTS, tensors)
    return directory


def random_words(count: int, seed: int = 0) -> Words:
    """The bits of finite values of bfloat16."""
    normal = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return (normal.view(np.uint32) >> 16).astype(np.uint16)


def moved(words: Words, share: float, seed: int = 1) -> Words:
    """The values after a step that moves a share of them to a neighbouring value."""
    random = np.random.default_rng(seed)
    steps = np.where(random.random(len(words)) < share, random.choice([-1, 1], len(words)), 0)
    return (words.astype(np.int32) + steps).clip(0, 0xFFFF).astype(np.uint16)


@settings(max_examples=60)
@given(st.integers(0, 400), st.floats(0, 1), st.integers(0, 2**32 - 1), st.booleans())
def test_the_file_that_is_made_is_the_published_one(
    tmp_path_factory: pytest.TempPathFactory, count: int, share: float, seed: int, grown: bool
) -> None:
    root = tmp_path_factory.mktemp("delta")
    old, same = random_words(count, seed), random_words(7)
    new = moved(old, share, seed)
    before = {"moved": bf16(old), "same": bf16(same)}
    after = {"moved": bf16(new), "same": bf16(same)} | ({"grown": bf16(random_words(5))} if grown else {})
    base, version = directory_with(root / "base", before), directory_with(root / "version", after)
    (file,) = write_delta(version, base)
    made = root / WEIGHTS
    checked = apply_delta(version / file.name, tensors_of(base), spec_of(version / WEIGHTS), made)
    assert made.read_bytes() == (version / WEIGHTS).read_bytes()
    assert set(checked.tensors) == set(after)
    assert sorted(path.name for path in version.iterdir()) == [WEIGHTS, file.name]


@pytest.mark.parametrize(
    ("share", "encodings", "most"),
    [
        (0.0, {"same"}, 0.0),
        (0.015, {"sparse", "xor"}, 0.05),
        (0.12, {"sparse", "xor"}, 0.15),
        (0.6, {"xor"}, 0.6),
        (1.0, {"dense"}, 1.0),
    ],
)
def test_the_smallest_encoding_is_chosen(share: float, encodings: set[str], most: float) -> None:
    """The bounds at 1.5 % and 12 % are those that training at rates of 1e-6 and 1e-5 has to keep."""
    old = random_words(400_000)
    new = moved(old, share) if share < 1 else random_words(400_000, seed=9)
    encoding, payload = encode(new.view(np.uint8), old.view(np.uint8), 2)
    assert encoding in encodings
    assert len(payload) <= most * old.nbytes


def test_a_tensor_that_has_changed_entirely_takes_little_memory() -> None:
    """The differences and the payload have the tensor's size; a list of places would have four times that."""
    new = np.arange(2**18, dtype=np.uint16)
    old = new ^ np.uint16(1)
    tracemalloc.start()
    try:
        encoding, _ = encode(new.view(np.uint8), old.view(np.uint8), 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert encoding == "dense"
    assert peak < 4 * new.nbytes


def test_changes_against_another_base_or_with_a_flipped_bit_are_refused(tmp_path: Path) -> None:
    old = random_words(1000)
    base = directory_with(tmp_path / "base", {"w": bf16(old)})
    other = directory_with(tmp_path / "other", {"w": bf16(random_words(1000, seed=3))})
    version = directory_with(tmp_path / "version", {"w": bf16(moved(old, 0.1))})
    (file,) = write_delta(version, base)
    spec, made = spec_of(version / WEIGHTS), tmp_path / WEIGHTS
    with pytest.raises(BrokenWeights, match="SHA-256"):
        apply_delta(version / file.name, tensors_of(other), spec, made)
    with pytest.raises(BrokenWeights, match="is not in the base"):
        apply_delta(version / file.name, {}, spec, made)
    content = bytearray((version / file.name).read_bytes())
    for position in range(0, len(content), 7):
        damaged = content.copy()
        damaged[position] ^= 0x10
        (tmp_path / "damaged").write_bytes(damaged)
        with suppress(BrokenWeights):
            apply_delta(tmp_path / "damaged", tensors_of(base), spec, made)
            assert made.read_bytes() == (version / WEIGHTS).read_bytes(), "a bit that zstandard ignores"


# A server


class Offered:
    """The versions of a store, as the trainer serves them; `asked` has the names of the fetched files."""

    def __init__(self, directory: Path) -> None:
        self.store = PolicyStore(directory / "offered", directory / "model", keep=10, anchor_every=3)
        self.asked: list[str] = []
        self.at_peer: dict[str, int] = {}
        """What another server, which has the versions, too, answers for a file in place of its content."""

    def write(self, version: int) -> None:
        def weights(directory: Path) -> list[FileSpec]:
            write_safetensors(directory / WEIGHTS, float32_tensors(1.0 + version / 1000, SHAPES))
            return [self._spec(directory / WEIGHTS)]

        self.store.write(version, version, weights)

    def _spec(self, path: Path) -> FileSpec:
        tensors = [TensorSpec(name, shape, "F32") for name, shape in SHAPES.items()]
        spec = spec_of(path)
        return FileSpec(spec.name, spec.size, spec.sha256, tensors)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        from_peer = str(request.url).startswith(PEER)
        version, *_, name = request.url.path.removeprefix("/weights/").split("/")
        if from_peer and (status := self.at_peer.get(name)):
            return httpx.Response(status)
        if name != MANIFEST:
            self.asked.append(f"peer: {name}" if from_peer else name)
        return httpx.Response(200, content=(self.store.path_of(int(version)) / name).read_bytes())

    def fetched(self) -> list[str]:
        asked, self.asked = sorted(name for name in self.asked if "safetensors" in name), []
        return asked


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    write_model(tmp_path / "model")
    async with make_harness(tmp_path, locations=[TRAINER]).started() as harness:
        yield harness


async def test_a_server_with_the_base_fetches_the_changes_and_another_one_the_whole(
    harness: Harness, tmp_path: Path
) -> None:
    """A version is whole after so many with changes."""
    offered = Offered(tmp_path)
    harness.network.source = offered.handle
    fetched = {}
    for version in range(1, 8):
        offered.write(version)
        if version == 2:
            continue  # the server misses a version
        assert (await harness.reload(version, f"{TRAINER}/weights/{version}")).status_code == 200
        fetched[version] = offered.fetched()
    with_changes = [(offered.store.path_of(version) / CHANGES).exists() for version in range(1, 8)]
    assert with_changes == [False, True, True, False, True, True, False]
    assert fetched == {1: [WEIGHTS], 3: [WEIGHTS], 4: [WEIGHTS], 5: [CHANGES], 6: [CHANGES], 7: [WEIGHTS]}
    assert harness.kept_weights(6) == (offered.store.path_of(6) / WEIGHTS).read_bytes()
    published = offered.store.path_of(6)
    path = f"/weights/6/{hashlib.sha256((published / MANIFEST).read_bytes()).hexdigest()}"
    for name in (CHANGES, WEIGHTS):  # other servers read them here
        assert (await harness.http.get(f"{path}/{name}")).content == (published / name).read_bytes()


PEERS: dict[str, tuple[dict[str, int], list[str]]] = {
    "has the changes": ({}, [f"peer: {CHANGES}"]),
    "has the whole file alone": ({CHANGES: 404}, [f"peer: {WEIGHTS}"]),
    "has neither": ({CHANGES: 404, WEIGHTS: 404}, [WEIGHTS]),
    "is away": ({CHANGES: 503, WEIGHTS: 503}, [CHANGES]),
}


@pytest.mark.parametrize("peer", PEERS)
async def test_a_server_reads_from_its_peer_also_if_it_has_the_base(
    turned: TurnedClock, harness: Harness, tmp_path: Path, peer: str
) -> None:
    """So the gateway knows how many servers read from the trainer at once."""
    offered = Offered(tmp_path)
    harness.network.source = offered.handle
    offered.write(1)
    assert (await harness.reload(1, f"{TRAINER}/weights/1")).status_code == 200
    offered.write(2)
    offered.fetched()
    offered.at_peer, expected = PEERS[peer]
    answer = await hastened(turned, harness.reload(2, f"{TRAINER}/weights/2", peer=PEER))
    assert answer.status_code == 200, answer.text
    assert offered.fetched() == expected
    assert harness.kept_weights(2) == (offered.store.path_of(2) / WEIGHTS).read_bytes()


async def test_changes_that_do_not_fit_are_replaced_by_the_whole_file(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offered = Offered(tmp_path)
    harness.network.source = offered.handle
    for version in (1, 2):
        offered.write(version)
    assert (await harness.reload(1, f"{TRAINER}/weights/1")).status_code == 200
    changes = offered.store.path_of(2) / CHANGES
    changes.write_bytes(changes.read_bytes()[:-1] + b"!")
    assert (await harness.reload(2, f"{TRAINER}/weights/2")).status_code == 200
    assert offered.fetched() == [WEIGHTS, WEIGHTS, CHANGES, CHANGES]
    assert "version 2 is fetched whole" in caplog.text
    assert (await harness.status())["version"] == 2
