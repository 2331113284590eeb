"""What the Tinker API costs: CPU of the gateway for a sample and a poll; the time until new weights sample.

python -m bench.tinker [--samples N] [--steps N]

samples    load ──▶ gateway ──▶ engine (bench.engine)             beside plain turns of the same length
weights    load ──▶ gateway ──▶ trainer by commands ──▶ SGLang    a whole stack, a tiny model
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx

from bench.gateway import Rig, measured, running_rig
from bench.isolated_stack import isolated_stack
from bench.processes import cpu_s, with_children
from gateway.rest.bodies import PROTOBUF
from gateway.tinker import messages_pb2 as wire
from tests.support.gateway.tinker_loop import datum
from tests.support.tiny_model import make_tiny_model
from weir.stack.services import services_of
from weir.stack.stack import Stack

T = TypeVar("T")
R = TypeVar("R")

CONCURRENCY = 32
TOKENS = 32
PROMPT = list(range(10, 70))
ADAM = {"learning_rate": 1e-3}
SERVICES = {"trainer": {"source": "commands"}, "rollout_server": {"lora": {"max_rank": 8, "max_loaded": 8}}}
READY_WITHIN_S = 300.0


class TinkerClient:
    """One client session."""

    def __init__(self, http: httpx.AsyncClient, base_model: str) -> None:
        self._http, self._base_model = http, base_model
        self.session_id = ""

    async def post(self, verb: str, body: dict[str, Any]) -> httpx.Response:
        return (await self._http.post(f"/api/v1/{verb}", json=body)).raise_for_status()

    async def begin(self) -> None:
        made = await self.post("create_session", {"tags": [], "sdk_version": "0.38.0"})
        self.session_id = made.json()["session_id"]

    async def sampler(self) -> str:
        """A sampling session of the base model."""
        body = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": self._base_model}
        made = await self.post("create_sampling_session", body)
        return str(made.json()["sampling_session_id"])

    async def ask(self, sampler: str, number: int, max_tokens: int = TOKENS) -> str:
        """The promise of a sample."""
        body = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [*PROMPT, 100 + number % 500]}]},
            "sampling_params": {"max_tokens": max_tokens, "stop": []},
        }
        return str((await self.post("asample", body)).json()["request_id"])

    async def poll(self, promise: str) -> httpx.Response:
        """The result, once there is one."""
        while True:
            reply = await self.post("retrieve_future", {"request_id": promise})
            if b"try_again" not in reply.content[:100]:
                if b'"error"' in reply.content[:100]:
                    raise SystemExit(reply.text)
                return reply

    async def command(self, verb: str, body: dict[str, Any]) -> httpx.Response:
        return await self.poll(str((await self.post(verb, body)).json()["request_id"]))

    async def learn(self, model_id: str, number: int) -> None:
        data = [datum(PROMPT, [each + 1 for each in PROMPT], weights=[1.0] * len(PROMPT))]
        body = wire.ForwardBackwardRequest(
            model_id=model_id, seq_id=number, data=data, loss_fn="cross_entropy"
        )
        reply = await self._http.post(
            "/api/v1/forward_backward",
            content=body.SerializeToString(),
            headers={"content-type": PROTOBUF},
        )
        await self.poll(str(reply.raise_for_status().json()["request_id"]))


async def at_once(call: Callable[[T], Coroutine[Any, Any, R]], arguments: Iterable[T]) -> list[R]:
    """What the call returns for each argument; so many calls run at a time."""
    room = asyncio.Semaphore(CONCURRENCY)

    async def one(argument: T) -> R:
        async with room:
            return await call(argument)

    return list(await asyncio.gather(*map(one, arguments)))


async def sampled(rig: Rig, model: Path, count: int) -> tuple[float, float]:
    """CPU µs of the gateway for a sample, from its submission to its result, and for a poll that finds it."""
    port, pid = rig.gateways[0]
    processes = with_children(pid)
    headers = {"x-api-key": "tml-bench-client"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as http:
        client = TinkerClient(http, str(model))
        await client.begin()
        sampler = await client.sampler()
        used = [sum(map(cpu_s, processes))]
        promises = await at_once(partial(client.ask, sampler), range(count))
        await at_once(client.poll, promises)
        used.append(sum(map(cpu_s, processes)))
        await at_once(client.poll, promises)
        used.append(sum(map(cpu_s, processes)))
    whole, poll = ((after - before) / count * 1e6 for before, after in pairwise(used))
    return whole - poll, poll


async def published(stack: Stack, model: Path, steps: int) -> list[float]:
    """Seconds from each `optim_step` until the first token of its weights is there."""
    headers = {"x-api-key": f"tml-{stack.settings.client_keys[0]}"}
    took = []
    async with httpx.AsyncClient(base_url=stack.gateway_url, headers=headers, timeout=60) as http:
        client = TinkerClient(http, str(model))
        await client.begin()
        body = {"session_id": client.session_id, "model_seq_id": 0, "base_model": str(model)}
        made = await client.command("create_model", {**body, "lora_config": {"rank": 8}})
        model_id = made.json()["model_id"]
        for step in range(steps):
            await client.learn(model_id, 3 * step + 1)
            began = time.perf_counter()
            order = {"model_id": model_id, "seq_id": 3 * step + 2}
            await client.post("optim_step", {**order, "adam_params": ADAM})
            order = {"model_id": model_id, "seq_id": 3 * step + 3}
            saved = await client.command(
                "save_weights_for_sampler", {**order, "sampling_session_seq_id": step}
            )
            await client.poll(await client.ask(saved.json()["sampling_session_id"], 0, max_tokens=1))
            took.append(time.perf_counter() - began)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "models" / "tiny" / "model")
        with running_rig(model, Path(name)) as rig:
            measured(rig, 8, 500, TOKENS, "plain")  # warm
            turns, samples, polls = [], [], []
            for _ in range(asked.repetitions):
                turns.append(measured(rig, CONCURRENCY, asked.samples, TOKENS, "plain")["cpu_us"])
                sample, poll = asyncio.run(sampled(rig, model, asked.samples))
                samples.append(sample)
                polls.append(poll)
        for what, values in (("a plain turn", turns), ("a sample", samples), ("a poll", polls)):
            print(f"{what}: {statistics.median(values):.0f} CPU µs", flush=True)
        settings = isolated_stack(Path(name) / "run", model, SERVICES)
        with Stack(settings, services_of(settings)) as stack:
            stack.wait_ready(timeout_s=READY_WITHIN_S)
            took = asyncio.run(published(stack, model, asked.steps))
    first, *later = took
    print(
        f"from optim_step to the first token of its weights: {statistics.median(later):.2f} s "
        f"(median of {len(later)}; {first:.2f} s the first time)"
    )


if __name__ == "__main__":
    main()
