"""Sends the tensors of the newest version from its snapshot to engines, each in a process group of its own.

rollout server ── POST /collective/{version} ─▶ join ─▶ a thread listens ─▶ where and what
engine ── joins ─▶ process group ◀─ a thread ◀─ bucket ◀─ snapshot in host memory
rollout server ── DELETE /collective/{group} ─▶ end ─▶ the thread ends

The next snapshot overwrites the memory. `withdraw` waits for the engines that receive the former one, and
then ends what still runs. Each thread copies a bucket before it sends it, so a broadcast that hangs does not
read the snapshot.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, field
from secrets import token_hex

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rollout_queue import clock
from rollout_queue.protocol.rollout_server_messages import FINGERPRINT_VALUES, JoinBody, Joining, SentTensor
from trainer_service.model.host_copies import HostTensor
from trainer_service.publishing.process_group import Broadcaster, joined_group, listening_store
from trainer_service.settings import CollectiveSettings

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 * 2**20
"""The most bytes of tensors in one broadcast, unless a single tensor has more."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their size in bytes."""
Bucket = Sequence[HostTensor]
Join = Callable[[TCPStore, str, int, torch.device, str, float], AbstractContextManager[Broadcaster]]
"""Joins a group, as `joined_group` does."""


class NotSent(Exception):
    """The tensors of the version cannot be sent. Its files have them."""


@dataclass(frozen=True)
class Offer:
    """A version whose tensors are in memory."""

    version: int
    manifest_sha256: str
    buckets: Sequence[Bucket]
    described: tuple[tuple[SentTensor, ...], ...]


@dataclass
class Transfer:
    """One engine that receives the tensors."""

    group: str
    ended: threading.Event = field(default_factory=threading.Event)
    copied: bool = False
    """The snapshot is not needed any more."""


class TensorSender:
    """Offers one version at a time, to `settings.senders` engines at once."""

    def __init__(
        self,
        settings: CollectiveSettings,
        device: torch.device,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        join: Join = joined_group,
    ) -> None:
        """On a CUDA `device`, engines on CUDA get the tensors over NCCL. `join` joins a group as rank 0."""
        self._settings, self._device, self._bucket_bytes = settings, device, bucket_bytes
        self._join = join
        self._executor = ThreadPoolExecutor(settings.senders, "sender")
        self._lock = threading.Lock()
        self._progress = threading.Event()
        """Set when a thread has copied a bucket, or has ended."""
        self._reading = threading.Lock()
        """Held while a thread reads the snapshot."""
        self._offer: Offer | None = None
        self._transfers: dict[str, Transfer] = {}

    def offer(self, version: int, manifest_sha256: str, tensors: Sequence[HostTensor]) -> None:
        """Offer the version until `withdraw`. Engines check no tensor that they receive, so a version with
        values that are not finite is not offered, except if they are the base model's."""
        for tensor in tensors:
            if not tensor.lasts and not is_finite(tensor.value):
                logger.error("version %d is not sent: %s is not finite", version, tensor.name)
                return
        buckets = list(in_buckets(tensors, self._bucket_bytes))
        described = tuple(tuple(_described(tensor) for tensor in bucket) for bucket in buckets)
        with self._lock:
            self._offer = Offer(version, manifest_sha256, buckets, described)

    def withdraw(self) -> None:
        """Offer nothing any more, and return when no thread reads the snapshot. Waits as long as engines
        take buckets. If none does for `timeout_s`, those that receive are left with a part of the tensors,
        and their servers start them again."""
        with self._lock:
            self._offer = None
        self._progress.clear()
        while not self._copied_all() and clock.wait(self._progress, self._settings.timeout_s):
            self._progress.clear()
        with self._reading:
            for transfer in list(self._transfers.values()):
                if not transfer.copied:
                    logger.error("%s ends: the engine takes too long", transfer.group)
                    transfer.ended.set()

    def holds(self, version: int) -> bool:
        """Whether the tensors of this version can be sent now."""
        offer = self._offer
        return offer is not None and offer.version == version

    def join(self, version: int, body: JoinBody) -> Future[Joining]:
        """Begin a transfer as soon as a thread is free. Raises NotSent, also in the future, which may be
        cancelled."""
        offer = self._offer
        if offer is None or offer.version != version:
            raise NotSent(_gone(version))
        if offer.manifest_sha256 != body.manifest_sha256:
            raise NotSent(f"the trainer has other tensors as version {version}")
        answer: Future[Joining] = Future()
        self._executor.submit(copy_context().run, self._send, offer, body, answer)
        return answer

    def end(self, group: str) -> bool:
        """The engine has everything, or has given up. Returns whether such a transfer runs."""
        transfer = self._transfers.get(group)
        if transfer is not None:
            transfer.ended.set()
        return transfer is not None

    def close(self) -> None:
        """Offer nothing any more, and wait until every thread has ended."""
        self.withdraw()
        for transfer in list(self._transfers.values()):
            transfer.ended.set()
        self._executor.shutdown()

    def _copied_all(self) -> bool:
        with self._lock:
            return all(transfer.copied for transfer in self._transfers.values())

    def _send(self, offer: Offer, body: JoinBody, answer: Future[Joining]) -> None:
        """Runs in a thread."""
        if not answer.set_running_or_notify_cancel():
            return
        transfer = Transfer(f"weir-{offer.version}-{token_hex(8)}")
        try:
            with self._lock:
                if self._offer is not offer:
                    raise NotSent(_gone(offer.version))
                self._transfers[transfer.group] = transfer
            self._transfer(offer, body, answer, transfer)
            logger.info("%s: an engine has the tensors of version %d", transfer.group, offer.version)
        except Exception as error:  # of torch.distributed, mostly
            if answer.done():
                logger.warning("%s failed: %s", transfer.group, error)
            else:
                answer.set_exception(error if isinstance(error, NotSent) else NotSent(str(error)))
        finally:
            with self._lock:
                self._transfers.pop(transfer.group, None)
            self._progress.set()

    def _transfer(self, offer: Offer, body: JoinBody, answer: Future[Joining], transfer: Transfer) -> None:
        address, timeout_s = self._settings.address, self._settings.timeout_s
        device = self._device if body.device == "cuda" else torch.device("cpu")
        with listening_store(address, timeout_s) as (store, port):
            joining = Joining(
                master_address=address,
                master_port=port,
                group=transfer.group,
                backend="nccl" if device.type == "cuda" else "gloo",
                world_size=1 + body.ranks,
                buckets=offer.described,
            )
            answer.set_result(joining)
            with self._join(
                store, transfer.group, joining.world_size, device, address, timeout_s
            ) as process_group:
                for content in self._contents(offer, transfer, device):
                    process_group.broadcast(content)
                # Its end would break what is still on the way.
                if not clock.wait(transfer.ended, timeout_s):
                    raise TimeoutError("the rollout server does not say that its engine has everything")

    def _contents(self, offer: Offer, transfer: Transfer, device: torch.device) -> Iterator[Tensor]:
        """The bytes of each bucket, in memory that the next one overwrites. Raises NotSent if the transfer
        is ended."""
        sizes = [sum(tensor.value.nbytes for tensor in bucket) for bucket in offer.buckets]
        memory = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        for size, bucket in zip(sizes, offer.buckets, strict=True):
            with self._reading:
                if transfer.ended.is_set():
                    raise NotSent("it was ended before the engine had everything")
                place = 0
                for tensor in bucket:
                    memory[place : place + tensor.value.nbytes].copy_(_raw(tensor.value))
                    place += tensor.value.nbytes
            transfer.copied = bucket is offer.buckets[-1]
            self._progress.set()
            yield memory[:size]


def in_buckets(tensors: Sequence[HostTensor], bucket_bytes: int) -> Iterator[list[HostTensor]]:
    """Divide the tensors. Those with the largest values come first, so that each begins at a multiple of the
    size of its values, as the engine requires."""
    bucket: list[HostTensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.value.itemsize):
        if bucket and size + tensor.value.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.value.nbytes
    yield bucket


def is_finite(value: Tensor) -> bool:
    """Whether every number of the tensor is finite."""
    return not value.numel() or bool(torch.stack(torch.aminmax(value)).isfinite().all())


def fingerprint(value: Tensor) -> int:
    """The sum of the bits of the first values, taken as whole numbers."""
    first = value.reshape(-1)[:FINGERPRINT_VALUES]
    return int(first.view(BITS[value.itemsize]).sum(dtype=torch.int64))


def _gone(version: int) -> str:
    return f"the trainer does not have the tensors of version {version} any more"


def _described(tensor: HostTensor) -> SentTensor:
    dtype = str(tensor.value.dtype).removeprefix("torch.")
    shape = tuple(tensor.value.shape)
    return SentTensor(name=tensor.name, dtype=dtype, shape=shape, fingerprint=fingerprint(tensor.value))


def _raw(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)
