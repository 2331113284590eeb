"""Reads the bytes of published files over a network: from the trainer, another server, or an object store."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import httpx

from rollout_queue.contract.published_policy import ObjectPrefix
from rollout_queue.http.callers import bearer
from rollout_queue.http.object_store import ObjectAbsent, ObjectStore, StoreUnavailable
from rollout_server.errors import WeightsUnavailable
from rollout_server.weights.locations import HttpLocation
from rollout_server.weights.safetensors_file import BrokenWeights

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
