"""Checks the whole loop on the device: SGLang samples, the trainer learns, and the new version is served."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch

from bench.gpu.checks import Check, at_most
from bench.gpu.kernels import LOGPROBS
from bench.isolated_stack import isolated_stack
from trainer_service.sizing import shape_of
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

SESSIONS, TOKENS = 8, 64
WAIT_S, POLL_S = 600.0, 0.2
LOAD_BYTES_PER_S = 0.5e9
"""A slow disk."""

Found = TypeVar("Found")


def loop(device: str, dtype: torch.dtype, model: Path, folder: Path) -> Iterator[Check]:
    settings = isolated_stack(folder, model, _services(device, str(dtype).removeprefix("torch.")))
    began = time.monotonic()
    with Stack(settings) as stack:
        stack.wait_ready(on_wait=lambda line: print(line, flush=True))
        yield at_most("the services are ready after", time.monotonic() - began, 600, " s")
        client, admin = (
            httpx.Client(base_url=stack.gateway_url, headers=_key(keys), timeout=120)
            for keys in (settings.client_keys, settings.admin_keys)
        )
        with client, admin:
            _play(client)
            version, seconds = _served(stack, admin, settings)
    step = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    yield at_most(
        "|Δlogprob| of trainer and engine, mean", step["mismatch/abs_logp"], LOGPROBS[dtype], " nats"
    )
    yield at_most("one step: norm of the gradient", step["grad_norm"], 1e3)
    yield Check("one push: version served", str(version), "1", version == 1)
    limit = 20 + 4 * shape_of(model).parameters / LOAD_BYTES_PER_S
    yield at_most("one push: from the last reward to the new version", seconds, limit, " s")


def _services(device: str, dtype: str) -> dict[str, Any]:
    on_cuda = device == "cuda"
    return {
        "gateway": {"engine_wait_s": 300},
        "rollout_server": {
            "engine_device": device,
            "dtype": dtype,
            "max_running_requests": 16,
            "max_total_tokens": 32_768,
            # The trainer needs memory of the same GPU.
            "engine_args": ["--mem-fraction-static", "0.4"] if on_cuda else [],
        },
        "trainer": {
            "device": device,
            **({} if on_cuda else {"threads": 1}),
            "algorithm": {"min_live_rows": SESSIONS // 2},
            "guards": {"max_abs_logp": None, "max_kl": None},  # this check reports them instead
        },
    }


def _key(keys: list[str]) -> dict[str, str]:
    return {"authorization": f"Bearer {keys[0]}"}


def _play(client: httpx.Client) -> None:
    """A group of sessions with one call each, which earn 0 and 1 in turn."""
    opened = client.post("/groups", json={"size": SESSIONS}).raise_for_status().json()["sessions"]
    for number, ticket in enumerate(opened):
        body = {"model": "policy", "messages": [{"role": "user", "content": "on"}], "max_tokens": TOKENS}
        headers = {"authorization": f"Bearer {ticket['api_key']}"}
        url = f"{ticket['base_url']}/chat/completions"
        client.post(url, json=body, headers=headers).raise_for_status()
        ending = {"status": "completed", "reward": float(number % 2)}
        client.post(f"/sessions/{ticket['session_id']}/finish", json=ending).raise_for_status()


def _served(stack: Stack, admin: httpx.Client, settings: StackSettings) -> tuple[int, float]:
    """The version that is served after the step, and the seconds that it took."""
    began = time.monotonic()

    def serving() -> int:
        stack.check()
        return int(admin.get("/admin/status").raise_for_status().json()["policy"]["serving"] or 0)

    return _until(serving), time.monotonic() - began


def _until(ask: Callable[[], Found]) -> Found:
    """The first answer that is true, or the last one before the time is over."""
    deadline = time.monotonic() + WAIT_S
    while not (found := ask()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found
