"""Lets prime-rl's orchestrator control the engine, by the routes that vLLM has: pause, new weights, resume.

POST /update_weights ─▶ manifest ─▶ reload                        of a server without a gateway
                               └──▶ the gateway ─▶ its push       of a server with one
POST /load_lora_adapter ─▶ manifest ─▶ the gateway ─▶ every server

A server that loaded a version by itself would get no calls from its gateway. So the gateway publishes the
version, and pushes it to every server.

The directory that the orchestrator names has weights and no manifest. It becomes a version:

step_12/ with model.safetensors, config.json, STABLE ─▶ manifest.json beside them ─▶ a published version
"""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rollout_queue import clock
from rollout_queue.contract.ids import new_id
from rollout_queue.contract.published_policy import (
    MANIFEST,
    STABLE,
    FileSpec,
    Manifest,
    TensorSpec,
    sha256_of,
)
from rollout_queue.http.callers import bearer
from rollout_queue.protocol.gateway_messages import PolicyBody
from rollout_queue.protocol.message import error_message
from rollout_queue.protocol.rollout_server_messages import AdapterBody, AdapterPushed
from rollout_server.engine.control import EngineFailed
from rollout_server.engine.engine import Engine
from rollout_server.errors import (
    EngineUnavailable,
    LocationRefused,
    NotServed,
    VersionRefused,
    WeightsRefused,
)
from rollout_server.preparation import as_reload_errors
from rollout_server.reload import Reloader, ReloadRequests
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.locations import FileLocation, WantedPolicy, parse_location
from rollout_server.weights.verify import FILE_NAME, read_manifest
from rollout_server.weights.weight_files import WEIGHTS_SUFFIX, BrokenWeights, read_header
from rollout_server.weights.weights_store import manifest_digest

logger = logging.getLogger(__name__)

NUMBERED = re.compile(r"step_(\d{1,15})")
"""How prime-rl names the directory of a step."""
SUFFIXES = (WEIGHTS_SUFFIX, ".json")
"""The files that belong to a version. The engine has the tokenizer of the model that it started with."""


def number_of(directory: Path) -> int | None:
    """The number in the directory's name; None if it has none."""
    named = NUMBERED.fullmatch(directory.name)
    return int(named[1]) if named else None


def with_manifest(place: FileLocation, version: int) -> str:
    """Write the manifest, unless the directory has one of this version; return its SHA-256.

    Several servers may do so at once: each writes the same bytes, and a file appears whole. Raises
    BrokenWeights, LocationRefused, OSError.
    """
    if not place.resolve(STABLE).is_file():
        raise BrokenWeights(f"has no {STABLE} file, so it may not be complete")
    path = place.resolve(MANIFEST)
    if path.is_file():
        text = path.read_bytes()
        read_manifest(text, version)
        return manifest_digest(text)
    names = sorted(each.name for each in place.directory.iterdir() if each.name.endswith(SUFFIXES))
    files = [_spec(place.resolve(name), name) for name in names if FILE_NAME.fullmatch(name)]
    text = msgspec.json.encode(Manifest(version=version, step=version, files=files))
    read_manifest(text, version)
    draft = path.with_name(f".{MANIFEST}.{new_id()}")
    draft.write_bytes(text)
    draft.replace(path)
    logger.info("wrote the manifest of version %d into %s", version, place.directory)
    return manifest_digest(text)


def _spec(path: Path, name: str) -> FileSpec:
    tensors = read_header(path).values() if name.endswith(WEIGHTS_SUFFIX) else ()
    specs = [TensorSpec(each.name, list(each.shape), each.dtype) for each in tensors]
    return FileSpec(name, path.stat().st_size, sha256_of(path), specs)


POLL_S = 1.0
"""How often the time of a pause is compared."""


class OrchestratedEngine:
    """One engine, as an orchestrator controls it."""

    def __init__(
        self,
        settings: RolloutServerSettings,
        engine: Engine,
        reloader: Reloader,
        reloads: ReloadRequests,
        http: httpx.AsyncClient,
    ) -> None:
        self._settings, self._engine, self._http = settings, engine, http
        self._reloader, self._reloads = reloader, reloads
        self._until = 0.0

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Let nothing run until `resume`, at most for `pause_limit_s`. Calls wait in the engine meanwhile.

        Waits while the engine loads a version. Raises NotServed, and EngineUnavailable if the engine goes
        on.
        """
        if mode != "keep":
            raise NotServed(f"mode {mode!r}: a pause keeps the calls that run (mode=keep)")
        async with self._reloader.swap:
            self._until = clock.monotonic() + self._settings.pause_limit_s
            if not self._engine.serving:
                raise EngineUnavailable(f"the engine is {self._engine.state}")
            try:
                await self._engine.client.pause()
                self._engine.held = True
                if clear_cache and not await self._engine.client.flush():
                    await self._let_go()
                    raise EngineUnavailable("the engine did not empty its cache")
            except EngineFailed as error:
                raise EngineUnavailable(str(error)) from error

    async def resume(self) -> bool:
        """End the pause. Returns whether there was one. Raises EngineUnavailable."""
        async with self._reloader.swap:
            held = self._engine.held
            try:
                await self._let_go()
            except EngineFailed as error:
                raise EngineUnavailable(str(error)) from error
            return held

    async def keep_time(self) -> None:
        """End a pause whose time is over."""
        if self._engine.held and clock.monotonic() >= self._until:
            logger.warning("nobody has ended the engine's pause in %g s", self._settings.pause_limit_s)
            await self.resume()

    async def update_weights(self, weight_dir: str | None) -> int:
        """Serve the weights in the directory, as a proved reload. Returns their version: the number in the
        directory's name (`step_12`), or the next one. Raises ReloadError; the former version stays then."""
        if weight_dir is None:
            raise LocationRefused("weight_dir: tensors over NCCL are not taken; send a directory")
        place, location = self._place(weight_dir)
        number = number_of(place.directory)
        version = self._engine.policy.version + 1 if number is None else number
        with as_reload_errors(version):
            digest = await asyncio.to_thread(with_manifest, place, version)
        if self._settings.gateway_url is None:
            wanted = WantedPolicy(version, location, digest)
            await self._reloads.run(version, self._reloader.reload(wanted))
        else:
            body = PolicyBody(
                version=version, location=location, manifest_sha256=digest, step=version, force=True
            )
            await self._publish("/admin/policies", body.model_dump())
        if self._engine.policy.version != version:
            raise EngineUnavailable(f"the engine serves version {self._engine.policy.version}, not {version}")
        return version

    async def load_adapter(self, name: str, directory: str) -> int:
        """Publish the adapter in the directory as a policy of its own. Returns its version, the `number_of`
        the directory. Raises ReloadError."""
        if self._settings.gateway_url is None:
            raise NotServed("an adapter is called through the gateway, and this server has none")
        if self._engine.held:
            raise EngineUnavailable("the engine is paused, and an adapter is proved by a call")
        place, location = self._place(directory)
        version = number_of(place.directory)
        if version is None:
            raise LocationRefused("lora_path: the name of the directory has no number (step_12)")
        with as_reload_errors(version):
            digest = await asyncio.to_thread(with_manifest, place, version)
        body = AdapterBody(name=name, version=version, location=location, manifest_sha256=digest)
        pushed = AdapterPushed.read(await self._publish("/admin/adapters", body.model_dump()))
        for result in pushed.results:
            if result.server == self._settings.name and not result.ok:
                raise EngineUnavailable(f"the adapter {name}@{version} is not loaded: {result.error}")
        return version

    async def _let_go(self) -> None:
        """End the pause, if there is one. Raises EngineFailed."""
        if self._engine.held and self._engine.serving:
            await self._engine.client.resume()
        self._engine.held = False

    def _place(self, directory: str) -> tuple[FileLocation, str]:
        """The directory, and its URL. Raises LocationRefused."""
        path = Path(directory)
        if not path.is_absolute() or "\0" in directory:
            raise LocationRefused("the directory is no absolute path")
        location = path.as_uri()
        place = parse_location(location, self._settings.allowed_locations)
        if not isinstance(place, FileLocation):
            raise LocationRefused("the directory is not on this machine")
        return place, location

    async def _publish(self, path: str, body: dict[str, Any]) -> bytes:
        """Have the gateway publish a version, and wait until its push has ended."""
        settings = self._settings
        headers = bearer(next(iter(settings.admin_keys), None))  # that of rollout servers publishes nothing
        url, timeout_s = f"{settings.gateway_url}{path}", settings.load_timeout_s
        try:
            answer = await self._http.post(url, json=body, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"the gateway does not publish the version: {error!r}") from error
        if answer.status_code in (httpx.codes.OK, httpx.codes.ACCEPTED, httpx.codes.MULTI_STATUS):
            return answer.content
        message = f"the gateway refuses the version: {error_message(answer.content)}"
        if answer.status_code == httpx.codes.CONFLICT:
            raise VersionRefused(message)
        if answer.is_client_error:
            raise WeightsRefused(message)
        raise EngineUnavailable(message)
