"""Has the engine receive a version's tensors from the trainer, in a process group of both.

ask ─▶ trainer: where to join, which tensors ─▶ checked against the manifest ─▶ reachable?
receive ─▶ engine: join ─▶ take the buckets ─▶ leave        trainer: end
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import httpx
from pydantic import ValidationError

from rollout_queue import clock
from rollout_queue.contract.published_policy import Manifest
from rollout_queue.foreign_json import read_json
from rollout_queue.http.callers import bearer
from rollout_queue.protocol.message import MalformedMessage, error_message
from rollout_queue.protocol.rollout_server_messages import Device, JoinBody, Joining, SentTensor
from rollout_server.engine.control import EngineControl, EngineFailed, EngineRefused
from rollout_server.weights.locations import LocalPolicy
from rollout_server.weights.weight_files import fingerprint, tensors_of

logger = logging.getLogger(__name__)

TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"} | {
    f"{kind}{bits}": f"{name}{bits}"
    for kind, name in (("I", "int"), ("U", "uint"))
    for bits in (8, 16, 32, 64)
}
END_TIMEOUT_S = 5.0
"""How long the trainer may take to answer a call that does not wait for anything."""


class NotReceived(Exception):
    """The tensors cannot be received, and the engine has changed nothing: files are loaded instead."""


class TensorReceiver:
    """Receives from one trainer, for one engine."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        engine: EngineControl,
        trainer_url: str,
        key: str | None,
        *,
        timeout_s: float,
        rest_s: float,
    ) -> None:
        self._client, self._engine = client, engine
        self._url = f"{trainer_url}/collective"
        self._headers = bearer(key)
        self._timeout_s, self._rest_s = timeout_s, rest_s
        self._rests_until = 0.0
        self._joined: str | None = None
        """The group for which the trainer waits."""
        self._received: tuple[LocalPolicy, Mapping[str, SentTensor]] | None = None
        """The policy that was received last, and its tensors."""

    def rest(self) -> None:
        """An engine was lost in a transfer: load files for a while."""
        self._rests_until = clock.monotonic() + self._rest_s

    async def offered(self, version: int) -> bool:
        """Whether the trainer can send the version now."""
        if clock.monotonic() < self._rests_until:
            return False
        try:
            answer = await self._call("GET", str(version))
            return answer.status_code == 200 and read_json(answer.content).get("held") is True
        except (NotReceived, ValueError, AttributeError):
            return False

    @asynccontextmanager
    async def joining(self, manifest: Manifest, policy: LocalPolicy) -> AsyncIterator[Joining]:
        """Have the trainer wait for the engine, as long as the block runs. Raises NotReceived."""
        if clock.monotonic() < self._rests_until:
            raise NotReceived("an engine was lost when it received tensors")
        body = await self._join_body(policy.manifest_sha256 or "")
        answer = await self._call("POST", str(policy.version), body, self._timeout_s + END_TIMEOUT_S)
        if answer.status_code != 200:
            raise NotReceived(f"the trainer answers {answer.status_code}: {error_message(answer.content)}")
        try:
            joining = Joining.read(answer.content)
        except MalformedMessage as error:
            raise NotReceived(f"the trainer's answer: {error}") from error
        self._joined = joining.group
        try:
            _check(joining, manifest)
            await self._reach(joining)
            yield joining
        finally:
            await self._end()

    async def receive(self, joining: Joining, policy: LocalPolicy) -> None:
        """Have the engine, which is paused, take the tensors. Raises NotReceived if it has changed nothing,
        and EngineFailed if it may have a part of them."""
        try:
            await self._engine.join_group(joining, self._timeout_s)
        except EngineRefused as error:
            raise NotReceived(str(error)) from error
        await self._engine.receive(joining, policy.version, self._timeout_s)
        # Both at once: the end of a group over NCCL may wait for the other ranks.
        await asyncio.gather(self._end(), self._leave(joining))
        self._received = (policy, {tensor.name: tensor for bucket in joining.buckets for tensor in bucket})

    async def _end(self) -> None:
        """Tell the trainer that nobody receives any more."""
        group, self._joined = self._joined, None
        if group is not None:
            with suppress(NotReceived):
                await self._call("DELETE", group)

    def differs(self, joining: Joining, former: LocalPolicy, *, float32_engine: bool) -> bool:
        """Whether the engine certainly holds other values after it has received than with `former`. Reads the
        files of `former`, unless it was received, too. Raises OSError."""
        known: Mapping[str, SentTensor] = {}
        if self._received is not None and self._received[0] == former:
            known = self._received[1]
        files = {} if known or not former.directory.exists() else tensors_of(former.directory)
        for tensor in (tensor for bucket in joining.buckets for tensor in bucket):
            if not (float32_engine or tensor.dtype == "bfloat16"):
                continue  # the engine may round both to the same values
            if tensor.name in known and known[tensor.name].dtype == tensor.dtype:
                if known[tensor.name].fingerprint != tensor.fingerprint:
                    return True
            elif tensor.name in files:
                path, stored = files[tensor.name]
                same_type = TORCH_NAMES[stored.dtype] == tensor.dtype
                if same_type and fingerprint(path, stored) != tensor.fingerprint:
                    return True
        return False

    async def _join_body(self, manifest_sha256: str) -> JoinBody:
        try:
            layout = await self._engine.layout()
            if layout.other_replicas != 1:
                raise NotReceived("the engine has pipeline or data parallelism")
            device: Device = "cuda" if layout.device == "cuda" else "cpu"
            return JoinBody(
                manifest_sha256=manifest_sha256,
                ranks=layout.tensor_parallel,
                device=device,
                wait_s=self._timeout_s,
            )
        except (EngineFailed, ValidationError) as error:
            raise NotReceived(str(error)) from error

    async def _reach(self, joining: Joining) -> None:
        """Raises NotReceived if this machine cannot connect to the trainer's ranks. The engine would wait for
        half an hour."""
        address, port = joining.master_address, joining.master_port
        try:
            async with clock.timeout(self._timeout_s):
                _, writer = await asyncio.open_connection(address, port)
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError) as error:
            raise NotReceived(f"{address}:{port} cannot be reached: {error!r}") from error

    async def _leave(self, joining: Joining) -> None:
        try:
            await self._engine.leave_group(joining.group)
        except EngineRefused as error:
            logger.warning("the engine keeps the group %s: %s", joining.group, error)

    async def _call(
        self, method: str, path: str, body: JoinBody | None = None, timeout_s: float = END_TIMEOUT_S
    ) -> httpx.Response:
        json = None if body is None else body.model_dump()
        url = f"{self._url}/{path}"
        try:
            return await self._client.request(
                method, url, json=json, headers=self._headers, timeout=timeout_s, follow_redirects=False
            )
        except httpx.HTTPError as error:
            raise NotReceived(f"{url}: {error!r}") from error


def _check(joining: Joining, manifest: Manifest) -> None:
    """Raises NotReceived unless exactly the manifest's tensors come."""
    wanted = sorted(
        (tensor.name, TORCH_NAMES.get(tensor.dtype), tuple(tensor.shape))
        for spec in manifest.files
        for tensor in spec.tensors
    )
    sent = sorted((each.name, each.dtype, each.shape) for bucket in joining.buckets for each in bucket)
    if sent != wanted:
        raise NotReceived("the trainer would send other tensors than the manifest names")
