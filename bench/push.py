"""The cost of a push: how long the trainer and a server stand still, and CPU time per GB of weights.

python -m bench.push [GB …]     sizes of the weights; 0.1 and 1 by default

The weights are random, in bfloat16. The engine is a double that loads in no time, so the pause is what the
rollout server adds to the engine's own load.
"""

import asyncio
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from rollout_queue.protocol.collective import JoinBody
from rollout_server.server import RolloutServer
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.policy import WantedPolicy
from tests.support.rollout_server.fakes import FakeEngine
from tests.support.serving import serving
from tests.support.trainer_service.receiving import receive
from trainer_service.model.export import ExportTensor
from trainer_service.model.snapshot import HostTensor, SnapshotMemory, WeightSnapshot
from trainer_service.publishing.tensor_sender import TensorSender
from trainer_service.settings import CollectiveSettings
from trainer_service.storage.delta_files import write_delta
from trainer_service.storage.policy_store import PolicyStore

GB = 10**9
DIGEST = "0" * 64
CHANGED = (0.015, 0.12)
"""The shares of values that a step at a learning rate of 1e-6, and of 1e-5, changes in bfloat16."""
COLUMNS = (
    "GB",
    "trainer blocked by the first version, s",
    "by a later one, s",
    "writing, s",
    "trainer's CPU, s/GB",
    "preparing files, s",
    "server's CPU, s/GB",
    "preparing over HTTP, s",
    "pause without the load, ms",
    "changes, 1.5 %",
    "CPU, s/GB",
    "changes, 12 %",
    "CPU, s/GB",
    "offering tensors, s",
    "sending them, s",
    "CPU of both sides, s/GB",
)
TENSOR_VALUES = 4096 * 4096


@dataclass
class Spent:
    """Wall-clock and CPU seconds of a block."""

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


def random_weights(size_bytes: float) -> dict[str, torch.Tensor]:
    values = int(size_bytes / 2)
    torch.manual_seed(0)
    sizes = [TENSOR_VALUES] * (values // TENSOR_VALUES) + [values % TENSOR_VALUES]
    return {f"layer.{n}.weight": torch.randn(size).bfloat16() for n, size in enumerate(sizes) if size}


def measure(gigabytes: float, directory: Path) -> list[str]:
    """One row of the table."""
    weights = random_weights(gigabytes * GB)
    tensors = [ExportTensor.of(name, tensor) for name, tensor in weights.items()]
    dtypes = {name: tensor.dtype for name, tensor in weights.items()}
    base = directory / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    store = PolicyStore(directory / "policies", base, keep=2)
    memory = SnapshotMemory()
    with spent() as first:
        memory.take(tensors, dtypes)
    with spent() as blocked:
        snapshot = memory.take(tensors, dtypes)
    with spent() as written:
        version = store.write(1, 1, snapshot.write)
    initial = store.write(0, 0, snapshot.write)
    changed = directory / "changed"
    changed.mkdir()
    rows = []
    for share in CHANGED:
        moved = WeightSnapshot([moved_by(share, each) for each in snapshot.tensors])
        moved.write(changed)
        with spent() as encoded:
            files = write_delta(changed, version)
        rows += [
            f"{sum(file.size for file in files) / (gigabytes * GB):.1%}",
            f"{encoded.cpu_s / gigabytes:.1f}",
        ]
    del moved
    offered, sent = transferred(snapshot)
    del snapshot, tensors
    with serving(Starlette(routes=[Mount("/", StaticFiles(directory=directory / "policies"))])) as source:
        file, pause_s = asyncio.run(pushed(directory, initial, version.as_uri()))
        http, _ = asyncio.run(pushed(directory, initial, f"{source}/{version.name}", source))
    return [
        f"{gigabytes:g}",
        f"{first.wall_s:.2f}",
        f"{blocked.wall_s:.2f}",
        f"{written.wall_s:.2f}",
        f"{(blocked.cpu_s + written.cpu_s) / gigabytes:.2f}",
        f"{file.wall_s:.2f}",
        f"{file.cpu_s / gigabytes:.2f}",
        f"{http.wall_s:.2f}",
        f"{1000 * pause_s:.0f}",
        *rows,
        f"{offered.wall_s:.2f}",
        f"{sent.wall_s:.2f}",
        f"{(offered.cpu_s + sent.cpu_s) / gigabytes:.2f}",
    ]


def transferred(snapshot: WeightSnapshot) -> tuple[Spent, Spent]:
    """What it takes to offer tensors, and to send them to a process group over loopback (gloo)."""
    sender = TensorSender(CollectiveSettings(), torch.device("cpu"))
    with spent() as offered:
        sender.offer(1, DIGEST, snapshot.tensors)
    wish = JoinBody(manifest_sha256=DIGEST, ranks=1, device="cpu", wait_s=60)
    with spent() as sent:
        joining = sender.join(1, wish).result()
        receive(joining)
    sender.end(joining.group)
    sender.close()
    return offered, sent


def moved_by(share: float, tensor: HostTensor) -> HostTensor:
    """The tensor after a step that moves a share of its values to a neighbouring value."""
    bits = tensor.value.view(torch.int16)
    steps = torch.where(torch.rand(bits.shape) < share, torch.randint(0, 2, bits.shape) * 2 - 1, 0)
    return HostTensor(tensor.name, (bits + steps.to(torch.int16)).view(torch.bfloat16))


async def pushed(directory: Path, model: Path, location: str, source: str = "") -> tuple[Spent, float]:
    """What preparing the version takes on a rollout server, and how long its engine then pauses."""
    settings = RolloutServerSettings(
        model_path=model,
        weights_dir=directory / "weights",
        locations=[str(directory), *([source] if source else [])],
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
    wanted = WantedPolicy(1, location)
    with spent() as prepared:
        await server.reloader.prefetch(wanted)
    seconds = await server.reloader.reload(wanted)
    await server.close()
    shutil.rmtree(settings.weights_dir)
    return prepared, seconds.paused


def main(arguments: list[str]) -> None:
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS))
    for gigabytes in [float(argument) for argument in arguments] or [0.1, 1.0]:
        with tempfile.TemporaryDirectory() as directory:
            print(f"| {' | '.join(measure(gigabytes, Path(directory)))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
