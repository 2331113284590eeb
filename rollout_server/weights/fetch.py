"""Copies a published set of weights onto this machine, while the engine goes on generating.

location, or a peer ─▶ manifest.json ─▶ files ─▶ v00000012.part/

A file of changes and the file of an earlier version make a weights file, with the published file's digest:

changes ─┐
base    ─┴▶ tensor after tensor ─▶ file, and the check of each byte (`weight_files`)

Over a network, the bytes come from the trainer, another server, or an object store.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from threading import Event
from typing import BinaryIO, Protocol

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from rollout_queue import clock
from rollout_queue.contract.published_policy import (
    MANIFEST,
    STABLE,
    DeltaHeader,
    FileSpec,
    Manifest,
    ObjectPrefix,
    TensorChange,
    WeightDelta,
)
from rollout_queue.http.callers import bearer
from rollout_queue.http.object_store import ObjectAbsent, ObjectStore, StoreUnavailable, opened
from rollout_queue.settings import ObjectStoreSettings
from rollout_server.errors import WeightsUnavailable
from rollout_server.weights.locations import FileLocation, HttpLocation, Location, is_under
from rollout_server.weights.weight_files import (
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    BrokenWeights,
    CheckedFile,
    CheckEnded,
    FileCheck,
    StoredTensor,
    WrongDigest,
    copy_checked,
    parse_header,
    tensors_of,
)

logger = logging.getLogger(__name__)


Raw = npt.NDArray[np.uint8]
Tensors = Mapping[str, tuple[Path, StoredTensor]]
"""By name: the file that has the tensor, and where."""


def apply_delta(
    changes: Path, base: Tensors, spec: FileSpec, target: Path, ended: Callable[[], bool] = lambda: False
) -> CheckedFile:
    """Write `target` from the file of changes and the base's tensors, and check it against `spec`.

    Raises BrokenWeights, OSError, and CheckEnded once `ended` returns True.
    """
    check = FileCheck(spec)
    with changes.open("rb") as file, target.open("wb") as made:
        header = _read_header(file, spec.name)
        text = header.header.encode()
        tensors = parse_header(text, spec.size, spec.name)
        for piece in _pieces(file, header, tensors, base, text):
            if ended():
                raise CheckEnded
            made.write(piece)
            check.feed(piece)
    return check.finish()


def _read_header(file: BinaryIO, name: str) -> DeltaHeader:
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise BrokenWeights("its file of changes has no header", file=name)
    try:
        return msgspec.json.decode(file.read(length), type=DeltaHeader)
    except msgspec.DecodeError as error:
        raise BrokenWeights(f"its file of changes has no header: {error}", file=name) from error


def _pieces(
    file: BinaryIO, header: DeltaHeader, tensors: Mapping[str, StoredTensor], base: Tensors, text: bytes
) -> Iterator[memoryview]:
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for change in header.changes:
        tensor = tensors.get(change.name)
        size = 0 if tensor is None else tensor.end - tensor.start
        if tensor is None or not 0 <= change.size <= max(size, 0):
            raise BrokenWeights("its change does not fit it", tensor=change.name)
        payload = file.read(change.size)
        if change.encoding == "dense":
            yield memoryview(payload)
        else:
            old = _old(base, tensor)
            new: memoryview = _changed(old, payload, change, ITEM_BYTES[tensor.dtype]).data
            yield new


def _old(base: Tensors, tensor: StoredTensor) -> Raw:
    if tensor.name not in base:
        raise BrokenWeights("is not in the base", tensor=tensor.name)
    path, stored = base[tensor.name]
    if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
        raise BrokenWeights("has another type or shape in the base", tensor=tensor.name)
    return np.fromfile(path, np.uint8, stored.end - stored.start, offset=stored.start)


def _changed(old: Raw, payload: bytes, change: TensorChange, item_bytes: int) -> Raw:
    """The tensor's new bytes. `old` is changed in place."""
    if change.encoding == "same":
        return old
    words = old.view(f"<u{item_bytes}")
    if change.encoding == "xor":
        planes = np.frombuffer(_decompressed(payload, old.nbytes, change.name), np.uint8)
        if len(planes) != old.nbytes:
            raise BrokenWeights("its change does not fit it", tensor=change.name)
        words ^= np.ascontiguousarray(planes.reshape(item_bytes, -1).T).reshape(-1).view(words.dtype)
        return old
    entry = 4 + item_bytes
    content = _decompressed(payload, entry * len(words), change.name)
    count, rest = divmod(len(content), entry)
    positions = np.cumsum(np.frombuffer(content, "<u4", count), dtype=np.uint64)
    if rest or (count and int(positions[-1]) >= len(words)):
        raise BrokenWeights("its change does not fit it", tensor=change.name)
    words[positions] ^= np.frombuffer(content, words.dtype, count, offset=4 * count)
    return old


def _decompressed(payload: bytes, most_bytes: int, name: str) -> bytes:
    """Raises BrokenWeights for anything but a frame of at most `most_bytes`."""
    try:
        if not 0 <= zstandard.frame_content_size(payload) <= most_bytes:
            raise BrokenWeights("its change does not fit it", tensor=name)
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=most_bytes)
    except zstandard.ZstdError as error:
        raise BrokenWeights(f"its change cannot be read: {error}", tensor=name) from error


NOT_THERE = (404, 410, 416)
"""A place that answers so does not have the file, or has a shorter one. Any other failure may pass, such as
that of a key that is being replaced, or of a proxy."""


class Source(Protocol):
    """A place that has the files of one version."""

    def chunks(self, name: str, start: int = 0) -> AsyncGenerator[bytes, None]:
        """The bytes of a file from `start` on, as they arrive. Raises BrokenWeights if the place does not
        offer the file, WeightsUnavailable if it or the connection fails."""
        ...


class HttpSource:
    """An HTTP server. It gets the key, if one is given."""

    def __init__(self, client: httpx.AsyncClient, location: HttpLocation, key: str | None) -> None:
        self._client, self._url = client, location.url
        self._headers = {"accept-encoding": "identity"} | bearer(key)

    async def chunks(self, name: str, start: int = 0) -> AsyncGenerator[bytes, None]:
        url = f"{self._url}/{name}"
        headers = self._headers | ({"range": f"bytes={start}-"} if start else {})
        try:
            async with self._client.stream("GET", url, headers=headers, follow_redirects=False) as response:
                if response.status_code in NOT_THERE:
                    raise BrokenWeights(f"cannot be fetched: HTTP {response.status_code}", file=name)
                if response.status_code not in (200, 206):
                    raise WeightsUnavailable(f"{url} cannot be fetched: HTTP {response.status_code}")
                skip = 0 if response.status_code == 206 else start  # a server that knows no ranges sends all
                async for chunk in response.aiter_bytes():
                    yield chunk[skip:]
                    skip = max(0, skip - len(chunk))
        except httpx.HTTPError as error:
            raise WeightsUnavailable(f"{url} cannot be fetched: {error!r}") from error


class ObjectSource:
    """A prefix in an object store."""

    def __init__(self, store: ObjectStore, prefix: ObjectPrefix) -> None:
        self._store, self._prefix = store, prefix

    async def chunks(self, name: str, start: int = 0) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._store.read(self._prefix.below(name), start)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ObjectAbsent as error:
            raise BrokenWeights(f"cannot be fetched: {error}", file=name) from error
        except StoreUnavailable as error:
            raise WeightsUnavailable(str(error)) from error


MAX_MANIFEST_BYTES = 32 * 2**20
PIECE_BYTES = 2**20
"""How many bytes are written and checked at once."""
DOWNLOADS = 4
"""How many files are downloaded at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
"""The pauses before a broken download is resumed; they double while no byte arrives."""
_Write = Callable[[bytes], object]


class Fetcher:
    """Reads published files, from a directory or over a network. Only the trainer and peers get the key."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        trainer_url: str,
        key: str | None,
        object_store: ObjectStoreSettings,
        silence_s: float,
    ) -> None:
        """A source that sends no byte for `silence_s` has failed."""
        self._client = client
        self._trainer_url = trainer_url
        self._key = key
        self._object_store = object_store
        self._silence_s = silence_s

    async def manifest(self, location: Location) -> bytes:
        if isinstance(location, FileLocation):
            return await asyncio.to_thread(_read_manifest_file, location)
        text = bytearray()
        async with self._source(location) as source:
            if isinstance(location, ObjectPrefix):
                await self._download(source, STABLE, 0, text.extend)
            await self._download(source, MANIFEST, MAX_MANIFEST_BYTES, text.extend)
        return bytes(text)

    async def files(
        self,
        location: Location,
        manifest: Manifest,
        into: Path,
        peer: HttpLocation | None = None,
    ) -> dict[str, CheckedFile]:
        """Copy every file of the manifest, several at once. Files that come over a network, or from another
        file system, are checked as they arrive, and returned; the other ones only get their names here. Files
        are read from `peer` first, and from `location` if that fails.

        Raises BrokenWeights, LocationRefused, WeightsUnavailable, OSError.
        """
        if isinstance(location, FileLocation):
            return await _links_or_copies(location, manifest.files, into)
        return await self._downloads(location, manifest.files, into, peer)

    async def changed_files(
        self,
        location: HttpLocation | ObjectPrefix,
        manifest: Manifest,
        delta: WeightDelta,
        base: Path,
        into: Path,
    ) -> dict[str, CheckedFile]:
        """As `files`, but the weights are made of the version in `base` and the files of changes, which stay
        beside them for other servers.

        Raises BrokenWeights if they do not fit each other, WeightsUnavailable, OSError.
        """
        made = {file.target: file for file in delta.files}
        others = [spec for spec in manifest.files if spec.name not in made]
        changes = [FileSpec(file.name, file.size, file.sha256) for file in delta.files]
        checked = await self._downloads(location, [*others, *changes], into)
        tensors, ended = await asyncio.to_thread(tensors_of, base), Event()
        try:
            for spec in manifest.files:
                if (file := made.get(spec.name)) is not None:
                    checked[spec.name] = await asyncio.to_thread(
                        apply_delta, into / file.name, tensors, spec, into / spec.name, ended.is_set
                    )
        finally:
            ended.set()
        return {spec.name: checked[spec.name] for spec in manifest.files}

    async def _downloads(
        self,
        location: HttpLocation | ObjectPrefix,
        specs: Sequence[FileSpec],
        into: Path,
        peer: HttpLocation | None = None,
    ) -> dict[str, CheckedFile]:
        slots = asyncio.Semaphore(DOWNLOADS)
        other = self._http_source(peer) if peer is not None else None
        async with self._source(location) as source, _failing_as_one() as group:
            tasks = [
                group.create_task(self._download_file(source, spec, into / spec.name, slots, other))
                for spec in specs
            ]
        return {spec.name: task.result() for spec, task in zip(specs, tasks, strict=True)}

    @asynccontextmanager
    async def _source(self, location: HttpLocation | ObjectPrefix) -> AsyncIterator[Source]:
        if isinstance(location, HttpLocation):
            yield self._http_source(location)
            return
        try:
            async with opened(self._object_store, self._silence_s) as store:
                yield ObjectSource(store, location)
        except StoreUnavailable as error:
            raise WeightsUnavailable(str(error)) from error

    def _http_source(self, location: HttpLocation) -> HttpSource:
        trusted = location.peer or is_under(location.url, self._trainer_url)
        return HttpSource(self._client, location, self._key if trusted else None)

    async def _download_file(
        self, source: Source, spec: FileSpec, target: Path, slots: asyncio.Semaphore, peer: Source | None
    ) -> CheckedFile:
        """Download and check one file, from the peer if that has it."""
        async with slots:
            if peer is not None:
                try:
                    return await self._resumed(peer, spec, target)
                except (BrokenWeights, WeightsUnavailable) as error:
                    logger.warning("%s is fetched from its own location: %s", spec.name, error)
            try:
                return await self._resumed(source, spec, target)
            except WrongDigest as error:
                logger.warning("%s; it is fetched once more", error)
            return await self._resumed(source, spec, target)

    async def _resumed(self, source: Source, spec: FileSpec, target: Path) -> CheckedFile:
        """Download and check one file. A connection that breaks is resumed where it broke, as long as each
        attempt brings new bytes."""
        check = FileCheck(spec)
        with target.open("wb") as file:

            def take(chunk: bytes) -> None:
                file.write(chunk)
                check.feed(chunk)

            pause_s, heard_at = FIRST_PAUSE_S, clock.monotonic()
            while True:
                begun = check.size
                try:
                    await self._download(source, spec.name, spec.size - begun, take, begun)
                    return await asyncio.to_thread(check.finish)
                except WeightsUnavailable as error:
                    if check.size > begun:
                        pause_s, heard_at = FIRST_PAUSE_S, clock.monotonic()
                    elif pause_s > LONGEST_PAUSE_S or clock.monotonic() - heard_at >= self._silence_s:
                        raise
                    else:
                        pause_s *= 2
                    logger.warning("%s; it goes on after %d bytes", error, check.size)
                await clock.sleep(pause_s)

    async def _download(
        self, source: Source, name: str, max_bytes: int, write: _Write, start: int = 0
    ) -> None:
        """Pass the bytes from `start` on to `write`. Raises BrokenWeights, and WeightsUnavailable if the
        source or the connection fails; the bytes so far were passed on then."""
        received, piece, piece_bytes = 0, list[bytes](), 0
        try:
            async with aclosing(source.chunks(name, start)) as chunks:
                async for chunk in chunks:
                    received += len(chunk)
                    if received > max_bytes:
                        raise BrokenWeights(f"is longer than {max_bytes + start} bytes", file=name)
                    piece.append(chunk)
                    piece_bytes += len(chunk)
                    if piece_bytes >= PIECE_BYTES:
                        await asyncio.to_thread(write, b"".join(piece))
                        piece, piece_bytes = [], 0
        except WeightsUnavailable:
            await asyncio.to_thread(write, b"".join(piece))
            raise
        await asyncio.to_thread(write, b"".join(piece))


@asynccontextmanager
async def _failing_as_one() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks. If one fails, the others end, and its own error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _links_or_copies(
    location: FileLocation, specs: Sequence[FileSpec], into: Path
) -> dict[str, CheckedFile]:
    slots, ended = asyncio.Semaphore(DOWNLOADS), Event()

    async def brought(spec: FileSpec) -> CheckedFile | None:
        async with slots:
            return await asyncio.to_thread(_link_or_copy, location, spec, into / spec.name, ended.is_set)

    try:
        async with _failing_as_one() as group:
            tasks = [group.create_task(brought(spec)) for spec in specs]
    finally:
        ended.set()
    return {checked.name: checked for task in tasks if (checked := task.result()) is not None}


def _read_manifest_file(location: FileLocation) -> bytes:
    if not location.resolve(STABLE).is_file():
        raise BrokenWeights(f"has no {STABLE} file, so it is not a published policy")
    path = location.resolve(MANIFEST)
    if not path.is_file():
        raise BrokenWeights("is missing", file=MANIFEST)
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise BrokenWeights(f"is longer than {MAX_MANIFEST_BYTES} bytes", file=MANIFEST)
    return path.read_bytes()


def _link_or_copy(
    location: FileLocation, spec: FileSpec, target: Path, ended: Callable[[], bool]
) -> CheckedFile | None:
    """Make a hard link, which costs neither time nor space. To another file system, make a copy, and check
    it. Raises CheckEnded once `ended` returns True."""
    source = location.resolve(spec.name)
    if not source.is_file():
        raise BrokenWeights("is missing", file=spec.name)
    if source.stat().st_size != spec.size:
        raise BrokenWeights(
            f"has {source.stat().st_size} bytes, the manifest says {spec.size}", file=spec.name
        )
    try:
        os.link(source, target)
    except OSError:
        return copy_checked(source, target, spec, ended)
    return None
