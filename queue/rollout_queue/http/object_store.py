"""An S3-compatible store of policies: reads, writes and removes objects, all in the caller's event loop.

Its credentials are those of AWS's own tools: AWS_ACCESS_KEY_ID and the like, ~/.aws, or a role. Nothing is
repeated here, because the callers know whether a repetition brings anything.

The libraries are imported when a store is opened: they take a third of a rollout server's start, and few
deployments have a store.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_queue import clock
from rollout_queue.contract.published_policy import ObjectPrefix
from rollout_queue.settings import ObjectStoreSettings

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from s3fs import S3FileSystem

CHUNK_BYTES = 2**18
PART_BYTES = 8 * 2**20
"""An object of twice this size or more is uploaded in parts. So a store takes objects of up to 80 GB."""
PARTS_AT_ONCE = 4
ABSENT = frozenset({"NoSuchKey", "InvalidRange"})
"""Codes of answers that are about the object. All others are about the store, or about the credentials."""


class StoreUnavailable(Exception):
    """The store cannot be reached, refuses the credentials, or cannot answer now."""


class ObjectAbsent(Exception):
    """The store has no such object, or the object ends before the byte that was asked for."""


class ObjectStore:
    """Every method raises StoreUnavailable."""

    def __init__(self, files: "S3FileSystem", client: Any, timeout_s: float) -> None:
        self._files, self._client, self._timeout_s = files, client, timeout_s

    async def read(self, place: ObjectPrefix, start: int = 0) -> AsyncGenerator[bytes, None]:
        """The bytes of an object from `start` on, as they arrive. Raises ObjectAbsent."""
        asked = {"Range": f"bytes={start}-"} if start else {}
        with _faults():
            reply = await self._client.get_object(Bucket=place.bucket, Key=place.path, **asked)
            async with reply["Body"] as body:
                async for chunk in body.iter_chunks(CHUNK_BYTES):
                    yield chunk

    async def write(self, place: ObjectPrefix, file: Path) -> None:
        """Upload a file. If no part of it ends within the timeout, this has failed. Raises OSError if the
        file cannot be read."""
        from fsspec.callbacks import Callback

        now = asyncio.get_running_loop().time
        try:
            with _faults():
                # The client's own timeouts do not count while it sends.
                async with clock.timeout(self._timeout_s) as limit:
                    ended = Callback(hooks={"part": lambda *_: limit.reschedule(now() + self._timeout_s)})
                    await self._files._put_file(
                        str(file), place.url, ended, PART_BYTES, max_concurrency=PARTS_AT_ONCE
                    )
        except TimeoutError as error:
            raise StoreUnavailable(f"the object store takes nothing of {file.name}") from error

    async def names(self, place: ObjectPrefix) -> list[str]:
        """The names of the objects below `place`."""
        found, prefix = list[str](), f"{place.path}/"
        with _faults():
            pages = self._client.get_paginator("list_objects_v2")
            async for page in pages.paginate(Bucket=place.bucket, Prefix=prefix):
                found += [each["Key"].removeprefix(prefix) for each in page.get("Contents", [])]
        return found

    async def remove(self, place: ObjectPrefix) -> None:
        """Remove one object, if it is there."""
        with _faults():
            await self._files._rm_file(place.url)

    async def end_uploads(self, place: ObjectPrefix) -> None:
        """Remove what broken uploads left below `place`. It is in no list of objects, and is paid for."""
        with _faults():
            pages = self._client.get_paginator("list_multipart_uploads")
            async for page in pages.paginate(Bucket=place.bucket, Prefix=f"{place.path}/"):
                for upload in page.get("Uploads", []):
                    await self._client.abort_multipart_upload(
                        Bucket=place.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )


@asynccontextmanager
async def opened(settings: ObjectStoreSettings, timeout_s: float) -> AsyncIterator[ObjectStore]:
    """A client for the store. `timeout_s` bounds connecting, and how long the store may be silent."""
    from aiobotocore.session import AioSession
    from s3fs import S3FileSystem

    session = AioSession()  # a new one, so that credentials that were mended are read
    session.register_component("data_loader", _loader())
    files = S3FileSystem(
        asynchronous=True,
        session=session,
        skip_instance_cache=True,
        use_listings_cache=False,
        endpoint_url=settings.endpoint_url,
        client_kwargs={"region_name": settings.region} if settings.region else {},
        config_kwargs={
            "connect_timeout": timeout_s,
            "read_timeout": timeout_s,
            "retries": {"total_max_attempts": 1},
            # Stores other than AWS's refuse the newer checksums; manifests have the digests of all files.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    )
    files.retries = 1
    with _faults():
        client = await files.set_session()
    try:
        yield ObjectStore(files, client, timeout_s)
    finally:
        await client.close()


@cache
def _loader() -> Any:
    """Keeps the descriptions of AWS's services: the next client then takes 40 ms in place of 150."""
    from aiobotocore.session import AioSession

    return AioSession().get_component("data_loader")


@contextmanager
def _faults() -> Iterator[None]:
    from aiohttp import ClientError as ConnectionFault
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ConnectionFault) as error:
        raise StoreUnavailable(f"the object store: {error}") from error
    except ClientError as error:
        raise _fault(error) from error
    except OSError as error:  # s3fs makes them of the store's answers
        if not isinstance(error.__cause__, ClientError):
            raise
        raise _fault(error.__cause__) from error


def _fault(answer: "ClientError") -> Exception:
    absent = answer.response.get("Error", {}).get("Code") in ABSENT
    return ObjectAbsent(str(answer)) if absent else StoreUnavailable(f"the object store: {answer}")
