"""The cost of a push: bytes, how long the trainer and a server stand still, and CPU time per GB of weights.

python -m bench.push [GB …]     sizes of the weights; 0.1 and 1 by default

The weights are random, in bfloat16. The engine is a double that loads in no time, so the pause is what the
rollout server adds to the load of the engine, and for tensors from the trainer their transfer. *To served*
begins when the trainer goes on: it writes the version, and the server prepares and loads it.
"""

import asyncio
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from rollout_queue.protocol.rollout_server_messages import JoinBody
from rollout_server.server import RolloutServer
from rollout_server.settings import EngineLoraSettings, RolloutServerSettings
from rollout_server.weights.locations import WantedPolicy
from tests.support.rollout_server.fakes import FakeEngine
from tests.support.serving import serving
from tests.support.trainer_service.receiving import receive
from trainer_service.model.exported_tensors import ExportTensor
from trainer_service.model.host_copies import HostTensor, SnapshotMemory, WeightSnapshot
from trainer_service.model.lora import AdapterSnapshot
from trainer_service.publishing.tensor_sender import TensorSender
from trainer_service.settings import CollectiveSettings
from trainer_service.storage.policy_store import PolicyStore, WeightsWriter

GB = 10**9
DIGEST = "0" * 64
CHANGED = {"1.5 % (1e-6)": 0.015, "12 % (1e-5)": 0.12}
"""The shares of values that a step changes in bfloat16, at these learning rates."""
WIDTH, RANK = 4096, 16
"""The width of each layer, and the rank of its adapter."""
COLUMNS = (
    "GB",
    "transport",
    "bytes, of the whole",
    "trainer blocked, s",
    "server paused, s",
    "to served, s",
    "CPU, s/GB",
)


@dataclass
class Spent:
    """Wall-clock and CPU seconds of a block, in all threads of this process."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def spent() -> Iterator[Spent]:
    found = Spent()
    wall_s, cpu_s = time.perf_counter(), _cpu_s()
    yield found
    found.wall_s, found.cpu_s = time.perf_counter() - wall_s, _cpu_s() - cpu_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class InstantEngine(FakeEngine):
    """An engine whose checksums and loads take no time."""

    @property
    def checksum(self) -> str:
        return str(self.directory)


@dataclass(frozen=True)
class Push:
    """What one version costs on its way."""

    transport: str
    share: float
    """The bytes that travel, of those of the whole weights."""
    blocked: Spent
    written: Spent
    prepared: Spent
    paused_s: float
    loaded: Spent

    def row(self, gigabytes: float) -> list[str]:
        to_served_s = self.written.wall_s + self.prepared.wall_s + self.loaded.wall_s
        cpu_s = sum(each.cpu_s for each in (self.blocked, self.written, self.prepared, self.loaded))
        return [
            f"{gigabytes:g}",
            self.transport,
            f"{self.share:.2%}",
            f"{self.blocked.wall_s:.3f}",
            f"{self.paused_s:.3f}",
            f"{to_served_s:.2f}",
            f"{cpu_s / gigabytes:.2f}",
        ]


def random_weights(size_bytes: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    rows, left = [], round(size_bytes / 2 / WIDTH)
    while left:
        rows.append(min(left, WIDTH))
        left -= rows[-1]
    layers = enumerate(rows)
    return {
        f"model.layers.{n}.mlp.down_proj.weight": torch.randn(each, WIDTH).bfloat16() for n, each in layers
    }


class Bench:
    """Pushes one set of weights by every transport."""

    def __init__(self, gigabytes: float, directory: Path) -> None:
        self._weights = random_weights(gigabytes * GB)
        self._gigabytes, self._directory = gigabytes, directory
        self._dtypes = {name: tensor.dtype for name, tensor in self._weights.items()}
        base = directory / "base"
        base.mkdir()
        (base / "config.json").write_text("{}")
        self._policies = directory / "policies"
        self._store = PolicyStore(self._policies, base, keep=2)
        self._changes = PolicyStore(self._policies, base, keep=2, anchor_every=100)
        self._memory = SnapshotMemory()
        self._take()  # its memory is touched for the first time
        self._initial = self._store.write(0, 0, self._take()[0].write)

    def pushes(self) -> Iterator[Push]:
        snapshot, blocked = self._take()
        snapshot = moved_snapshot(0.015, snapshot)
        written = self._written(self._store, 1, snapshot.write)
        with self._source() as source:
            for transport, location in (("files, shared disk", ""), ("files, HTTP", source)):
                yield self._pushed(transport, 1.0, blocked, written, 1, location)
            version = 1
            for name, share in CHANGED.items():
                version += 1
                snapshot = moved_snapshot(share, snapshot)
                written = self._written(self._changes, version, snapshot.write)
                files = self._store.path_of(version).glob("*.delta")
                sent = sum(file.stat().st_size for file in files) / (self._gigabytes * GB)
                yield self._pushed(f"changes, {name}", sent, blocked, written, version, source, version - 1)
            yield self._adapter(version + 1, source)
        yield self._received(snapshot, blocked)

    def _take(self) -> tuple[WeightSnapshot, Spent]:
        tensors = [ExportTensor.of(name, tensor) for name, tensor in self._weights.items()]
        with spent() as blocked:
            snapshot = self._memory.take(tensors, self._dtypes)
        return snapshot, blocked

    def _written(self, store: PolicyStore, version: int, write: WeightsWriter) -> Spent:
        with spent() as written:
            store.write(version, version, write)
        return written

    @contextmanager
    def _source(self) -> Iterator[str]:
        with serving(Starlette(routes=[Mount("/", StaticFiles(directory=self._policies))])) as source:
            yield source

    def _pushed(
        self,
        transport: str,
        share: float,
        blocked: Spent,
        written: Spent,
        version: int,
        source: str,
        base: int | None = None,
    ) -> Push:
        """Push the version to one rollout server, which has the version `base` already."""
        prepared, paused_s, loaded = asyncio.run(self._loaded(version, source, base))
        return Push(transport, share, blocked, written, prepared, paused_s, loaded)

    async def _loaded(self, version: int, source: str, base: int | None) -> tuple[Spent, float, Spent]:
        settings = RolloutServerSettings(
            model_path=self._initial,
            weights_dir=self._directory / "weights",
            locations=[str(self._directory), *([source] if source else [])],
            lora=EngineLoraSettings(target_modules=["down_proj"]),
            drain_timeout_s=0,
        )
        engine = InstantEngine()
        server = RolloutServer(
            settings,
            httpx.AsyncClient(transport=httpx.MockTransport(engine.handle), base_url="http://engine"),
            httpx.AsyncClient(timeout=60),
            engine.start,
            settings.weights_dir / "own",
            float32_engine=False,
        )
        await server.open()
        await server.engine.wait_until_serving(60)
        if base is not None:
            await server.reloader.reload(WantedPolicy(base, self._location(base, source)))
        wanted = WantedPolicy(version, self._location(version, source))
        with spent() as prepared:
            await server.reloader.prefetch(wanted)
        with spent() as loaded:
            seconds = await server.reloader.reload(wanted)
        await server.close()
        shutil.rmtree(settings.weights_dir)
        return prepared, seconds.paused, loaded

    def _location(self, version: int, source: str) -> str:
        path = self._store.path_of(version)
        return f"{source}/{path.name}" if source else path.as_uri()

    def _adapter(self, version: int, source: str) -> Push:
        """Push an adapter of every layer."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        factors = adapter_of(shapes)
        tensors = [ExportTensor.of(name, tensor) for name, tensor in factors.items()]
        dtypes = {name: tensor.dtype for name, tensor in factors.items()}
        memory = SnapshotMemory()
        memory.take(tensors, dtypes)
        with spent() as blocked:
            kept = memory.take(tensors, dtypes).tensors
        config = b'{"peft_type": "LORA", "r": %d, "lora_alpha": 32, "target_modules": ["down_proj"]}' % RANK
        snapshot = AdapterSnapshot(config, kept)
        written = self._written(self._store, version, snapshot.write)
        sent = sum(tensor.nbytes for tensor in factors.values()) / (self._gigabytes * GB)
        return self._pushed(f"adapter, rank {RANK}", sent, blocked, written, version, source)

    def _received(self, snapshot: WeightSnapshot, blocked: Spent) -> Push:
        """Send the tensors to a process group over loopback (gloo). The files are not waited for."""
        sender = TensorSender(CollectiveSettings(), torch.device("cpu"))
        with spent() as offered:
            sender.offer(1, DIGEST, snapshot.tensors)
        wish = JoinBody(manifest_sha256=DIGEST, ranks=1, device="cpu", wait_s=60)
        with spent() as sent:
            joining = sender.join(1, wish).result()
            receive(joining)
        sender.end(joining.group)
        sender.close()
        return Push("tensors, gloo", 1.0, blocked, offered, Spent(), sent.wall_s, sent)


def adapter_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    factors = {}
    for name, (rows, columns) in shapes.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        factors[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns).bfloat16()
        factors[f"{layer}.lora_B.weight"] = torch.randn(rows, RANK).bfloat16()
    return factors


def moved_snapshot(share: float, snapshot: WeightSnapshot) -> WeightSnapshot:
    """The weights after a step that moves a share of the values to a neighbouring value."""
    return WeightSnapshot([moved_by(share, each) for each in snapshot.tensors])


def moved_by(share: float, tensor: HostTensor) -> HostTensor:
    bits = tensor.value.view(torch.int16)
    moves = (torch.rand(bits.shape) < share) & (tensor.value != 0)  # one step below 0 is NaN
    steps = torch.where(moves, torch.randint(0, 2, bits.shape) * 2 - 1, 0)
    return HostTensor(tensor.name, (bits + steps.to(torch.int16)).view(torch.bfloat16))


def main(arguments: list[str]) -> None:
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS))
    for gigabytes in [float(argument) for argument in arguments] or [0.1, 1.0]:
        with tempfile.TemporaryDirectory() as directory:
            for push in Bench(gigabytes, Path(directory)).pushes():
                print(f"| {' | '.join(push.row(gigabytes))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
