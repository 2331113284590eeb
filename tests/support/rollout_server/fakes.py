"""A fake SGLang: it has weights, lists its calls, fails where a test says so, and dies where SGLang dies.

Like SGLang's scheduler, it dies when memory is released while a request runs, when memory is taken again that
was not released, and when it is to sample without its memory. Weights that were released are garbage until
others are loaded.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from rollout_server.weights.locations import LocalPolicy


class FakeEngine:
    """An engine that can be restarted: `start` starts its process, `handle` answers its HTTP requests."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.timeouts_s: dict[str, float] = {}
        """How long the last call of each path would have waited for its answer."""
        self.deaths: list[str] = []
        """Why it died by itself."""
        self.boots: list[LocalPolicy] = []
        self.process: FakeProcess | None = None
        self.directory = Path()
        self.version = "0"
        self.paused = False
        self.running = 2
        self.retracted = 0
        self.released: set[str] = set()
        """The parts of its memory that are released."""
        self.garbage = False
        """Whether its weights have lost their content."""
        self.busy_pauses = 0
        """How many pauses leave the engine busy."""
        self.boot_gate = asyncio.Event()
        """The engine finishes its start when this event is set."""
        self.boot_gate.set()
        self.load_gate = asyncio.Event()
        """A load of weights continues when this event is set."""
        self.load_gate.set()
        self.sample_gate = asyncio.Event()
        """A request for a token continues when this event is set."""
        self.sample_gate.set()
        self.says_version: str | None = None
        self.on_load: Callable[[], httpx.Response | None] = lambda: None
        """Called before a load, and may answer in its place."""
        self.keeps_old_weights = False
        self.adapters: dict[str, Path] = {}
        self.aborts = 0
        """How often the requests that ran were aborted."""
        self.refuses_adapters: str | None = None
        self.dies_with_adapters = False
        """The process dies when it samples with an adapter, as SGLang does that cannot apply one."""
        self.info: dict[str, object] = {"tp_size": 2, "pp_size": 1, "dp_size": 1, "device": "cpu"}
        self.groups: set[str] = set()
        """The process groups that the engine has joined."""
        self.in_session = False
        self.bodies: list[dict[str, Any]] = []
        """The bodies of the calls that receive tensors."""
        self.broadcasts = Path()
        """The files that have the tensors which a process group would bring."""
        self.refuses: str | None = None
        """The path of a call that the engine answers with 400, as when the other rank is gone."""

    async def start(self, policy: LocalPolicy) -> "FakeProcess":
        self.boots.append(policy)
        self.directory, self.version, self.paused = policy.directory, str(policy.version), False
        self.released, self.garbage = set(), False
        self.groups, self.in_session = set(), False
        self.process = FakeProcess()
        self.adapters.clear()
        return self.process

    @property
    def waiting(self) -> int:
        return self.running // 2 + self.retracted

    @property
    def _idle(self) -> bool:
        return not self.running and (self.paused or not self.waiting)

    @property
    def checksum(self) -> str:
        if self.garbage:
            return "garbage"
        files = sorted(self.directory.glob("*.safetensors"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if self.process is None or self.process.exited:
            raise httpx.ConnectError("nobody listens")
        if path == "/ready":
            return httpx.Response(200 if self.boot_gate.is_set() and not self.paused else 503)
        if path == "/ping":
            return httpx.Response(200)
        tags = json.loads(request.content)["tags"] if path.endswith("memory_occupation") else []
        self.calls.append(" ".join([path, *tags]))
        self.timeouts_s[path] = request.extensions.get("timeout", {}).get("read", 0.0)
        if path == "/model_info":
            return httpx.Response(200, json={"weight_version": self.says_version or self.version})
        if path == "/weights_checker":
            return httpx.Response(200, json={"success": True, "per_engine_checksum": self.checksum})
        if path == "/v1/loads":
            return httpx.Response(
                200,
                json={"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": self.waiting}]},
            )
        if path == "/update_weights_from_disk":
            await self.load_gate.wait()
            return self._load(json.loads(request.content))
        if path in ("/v1/models", "/load_lora_adapter", "/generate"):
            return await self._adapter(path, json.loads(request.content or "{}"))
        if path == "/flush_cache":
            return httpx.Response(200 if self._idle else 400)
        if path == "/release_memory_occupation":
            return await self._release(tags)
        if path == "/resume_memory_occupation":
            return await self._reoccupy(tags)
        if path == "/server_info":
            return httpx.Response(200, json=self.info)
        if "weight" in path:
            return self._receive(path, json.loads(request.content))
        if path not in ("/pause_generation", "/continue_generation"):
            return httpx.Response(200, json={"status": "ok"})
        self.paused = path == "/pause_generation"
        if self.paused:
            self.aborts += json.loads(request.content or "{}").get("mode") == "abort"
            if self.busy_pauses:
                self.busy_pauses -= 1
            else:
                self.retracted, self.running = self.retracted + self.running, 0
        elif self.released and self.running + self.waiting:
            await self.die("a forward pass without its memory")
        else:
            assert not self.garbage, "no token may be sampled with weights that were released"
            self.running, self.retracted = self.running + self.retracted, 0
        return httpx.Response(200, json={"status": "ok"})

    async def _adapter(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The part of SGLang that has to do with LoRA adapters."""
        if path == "/v1/models":
            listed = [{"id": name, "parent": "model"} for name in self.adapters]
            return httpx.Response(200, json={"data": [{"id": "model", "parent": None}, *listed]})
        if path == "/load_lora_adapter":
            if self.refuses_adapters or body["lora_name"] in self.adapters:
                said = {"success": False, "error_message": self.refuses_adapters or "already loaded"}
                return httpx.Response(400, json=said)
            self.adapters[body["lora_name"]] = Path(body["lora_path"])
            return httpx.Response(200, json={"success": True, "loaded_adapters": {}})
        await self.sample_gate.wait()
        assert not self.paused, "a request to a paused engine waits for ever"
        if self.dies_with_adapters:
            await self.die("Cannot find target module name")
        assert body["lora_path"] in self.adapters
        return httpx.Response(200, json={"meta_info": {"output_token_logprobs": [[-1.5, 0, None]]}})

    async def die(self, why: str) -> None:
        """Die as SGLang does when its scheduler raises: the request that caused it gets no answer."""
        self.deaths.append(why)
        assert self.process is not None
        await self.process.kill()
        raise httpx.ReadError(why)

    async def _release(self, tags: list[str]) -> httpx.Response:
        if not self._idle:
            await self.die("release_memory_occupation should be called only when server is idle.")
        self.released |= set(tags)
        self.garbage = self.garbage or "weights" in tags
        return httpx.Response(200, content=b"null")

    async def _reoccupy(self, tags: list[str]) -> httpx.Response:
        if not set(tags) <= self.released:
            await self.die(f"KeyError: {tags}")
        self.released -= set(tags)
        return httpx.Response(200, content=b"null")

    def _receive(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The calls of a transfer, which need a session, as with SGLang."""
        self.bodies.append(body)
        group = body.get("group_name", "")
        wrong = {
            "/init_weights_update_group": False,
            "/begin_weight_update": self.in_session,
            "/update_weights_from_distributed": not self.in_session or group not in self.groups,
            "/end_weight_update": not self.in_session,
            "/destroy_weights_update_group": group not in self.groups,
        }[path]
        if wrong or path == self.refuses:
            return httpx.Response(400, json={"success": False, "message": "refused"})
        match path:
            case "/init_weights_update_group":
                self.groups.add(group)
            case "/destroy_weights_update_group":
                self.groups.remove(group)
            case "/update_weights_from_distributed":
                assert self.paused, "weights must not change under a running generation"
                if body["weight_version"] is not None:
                    self.version = body["weight_version"]
                    self.directory = self.directory if self.keeps_old_weights else self.broadcasts
            case _:
                self.in_session = path == "/begin_weight_update"
        return httpx.Response(200, json={"success": True, "message": ""})

    def _load(self, body: dict[str, str]) -> httpx.Response:
        assert self.paused, "weights must not change under a running generation"
        assert "weights" not in self.released, "released weights cannot be written"
        if (answer := self.on_load()) is not None:
            return answer
        if not Path(body["model_path"]).is_dir():
            return httpx.Response(400, json={"success": False, "message": "no such directory"})
        self.garbage = False
        if not self.keeps_old_weights:
            self.directory = Path(body["model_path"])
        self.version = body["weight_version"]
        return httpx.Response(200, json={"success": True, "message": ""})


class FakeProcess:
    """A process that runs until it is stopped or killed."""

    def __init__(self) -> None:
        self._dead = asyncio.Event()

    @property
    def exited(self) -> bool:
        return self._dead.is_set()

    async def wait(self) -> int:
        await self._dead.wait()
        return -9

    async def kill(self) -> None:
        self._dead.set()

    async def stop(self) -> None:
        self._dead.set()

    def note_memory(self) -> None:
        pass

    def log_tail(self) -> str:
        return "the fake was killed"
