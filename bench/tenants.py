"""What a hostile tenant costs another one: the latency of a steady stream of turns, and refusals.

python -m bench.tenants [WAY …] [--rounds N] [--calls N] [--pace-ms MS]

quiet tenant (this process)   ── RATE turns a second, plain and streamed ──▶ gateway 1 ─┬─▶ bench.engine
hostile tenant (its process)  ── one WAY after the other ──▶ gateway 1, or 2 ───────────┘

Each round has three parts: the quiet tenant *alone*, both at gateway 1 (*beside*), and the hostile one at
gateway 2 (*elsewhere*). All processes share the machine. So the third part says what the hostile tenant costs
as a load of the machine, without anything that the two share in a gateway.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, Literal, get_args

import httpx
import uvloop

from bench.gateway import running_rig
from bench.load import Client, LoadTally
from bench.processes import module
from tests.support.tiny_model import make_tiny_model

QUIET, HOSTILE = "bench-client", "bench-hostile"
RATE, TOKENS = 20, 16
"""The quiet tenant's turns a second, and the tokens of each answer."""
CHAT, TOLD = "/v1/chat/completions", [{"role": "user", "content": "hi"}]
MIB = 2**20
FULL = {"WEIR_GATEWAY__CONCURRENCY": json.dumps({"first": 4, "least": 4, "most": 4})}
Place = Literal["alone", "beside", "elsewhere"]

# The hostile tenant


def post(path: str, body: bytes, missing: int = 0) -> bytes:
    """A call without its last `missing` bytes."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {HOSTILE}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body) + missing}\r\n\r\n"
    return head.encode() + body


def chat(**fields: Any) -> bytes:
    return post(CHAT, json.dumps({"messages": TOLD, "max_tokens": TOKENS} | fields).encode())


def full_of(piece: bytes, size: int, form: bytes = b'{"messages": [%s1]}') -> Iterator[bytes]:
    return repeat(post(CHAT, form % (piece * (size // len(piece)))))


def rewards(source: str) -> Iterator[bytes]:
    """Rewards with keys of their own, a thousand for one session after the other."""
    for number in count():
        session = f"s{os.getpid()}-{number}"
        yield post("/sessions", json.dumps({"session_id": session}).encode())
        for key in map(str, range(1000)):
            given = json.dumps({"value": 1.0, "key": key, "source": source}).encode()
            yield post(f"/sessions/{session}/reward", given)


def schemas(field: Callable[[int, int], dict[str, object]], fields: int) -> Iterator[bytes]:
    """Schemas of strings, no two the same, with and without `strict`."""
    for number in count():
        properties = {f"f{n}": {"type": "string"} | field(number, n) for n in range(fields)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        named = {"name": "n", "strict": number % 2 == 0, "schema": schema}
        yield chat(response_format={"type": "json_schema", "json_schema": named})


@dataclass(frozen=True)
class Way:
    """A way to be hostile."""

    calls: Callable[[], Iterator[bytes]]
    connections: int = 4
    full: bool = False
    """Whether the engine takes four calls at once."""


BIASES = b'{"messages":[],"logit_bias":{%s"1":1}}'
TEXT = b'{"messages":[{"role":"user","content":"%s"}]}'
TINKER = b'{"tags":[],"user_metadata":{"a":"%s"},"sdk_version":"1"}' % (b"x" * MIB)
WAYS = {
    "rewards with texts of 30 MiB": Way(partial(rewards, "x" * 30 * MIB)),
    "small rewards": Way(partial(rewards, "x" * 200), 8),
    "Tinker sessions of 1 MiB": Way(lambda: repeat(post("/api/v1/create_session", TINKER)), 8),
    "grammars of 900 lengths": Way(partial(schemas, lambda i, n: {"maxLength": 10**6 + i + n}, 900), 8),
    "grammars of large patterns": Way(
        partial(schemas, lambda i, _: {"pattern": f"(.{{0,99}}){{0,99}}{i}"}, 1)
    ),
    "nested lists, 23 MB": Way(partial(full_of, b"[[[[]]]],", 23_000_000)),
    "lists, 0.25 MB": Way(partial(full_of, b"[],", 250_000), 8),
    "`logit_bias`, 32 MB": Way(partial(full_of, b'"1":1,', 32_000_000, BIASES)),
    "small messages, 31 MB": Way(partial(full_of, b'{"role":"user","content":"x"},', 31_000_000)),
    "a text of `<\\|im_`, 31 MB": Way(partial(full_of, b"<|im_", 31_000_000, TEXT)),
    "81 half-sent bodies": Way(lambda: repeat(post(CHAT, b" " * 6_600_000, missing=1)), 81),
    "80 calls at a full engine": Way(lambda: repeat(chat()), 80, full=True),
}


async def attack(way: Way, port: int, seconds: float) -> Counter[str]:
    """Make the calls of a way on its connections for so long. Counts the statuses of the answers."""
    loop, tally = asyncio.get_running_loop(), LoadTally(0)

    async def connection() -> None:
        calls = way.calls()
        while True:
            client = partial(Client, calls, tally, False, done := loop.create_future())
            line, _ = await loop.create_connection(client, "127.0.0.1", port)
            try:
                await done
            finally:
                line.abort()

    connections = [asyncio.create_task(connection()) for _ in range(way.connections)]
    print("begun", flush=True)
    await asyncio.sleep(seconds)
    for each in connections:
        each.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
    return Counter({"200": len(tally.latencies_ms)}) + Counter(each[:3] for each in tally.failures)


# The quiet tenant


@dataclass(frozen=True)
class Turn:
    """One turn of the quiet tenant."""

    stream: bool
    ms: float
    refusal: str | None


async def turn(http: httpx.AsyncClient, number: int) -> Turn:
    stream, began, refusal = number % 2 == 1, time.perf_counter(), None
    try:
        reply = await http.post(CHAT, json={"messages": TOLD, "max_tokens": TOKENS, "stream": stream})
        if reply.status_code != 200 or not reply.text.endswith("data: [DONE]\n\n" if stream else "}"):
            refusal = f"{reply.status_code} {reply.text[-300:]}"
    except httpx.TransportError as error:
        refusal = repr(error)
    return Turn(stream, (time.perf_counter() - began) * 1000, refusal)


async def turns(port: int, calls: int) -> list[Turn]:
    """Make the turns, each at its time, however long the others take."""
    headers, made = {"authorization": f"Bearer {QUIET}"}, []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120) as http:
        began = time.perf_counter()
        for number in range(calls):
            await asyncio.sleep(max(0.0, began + number / RATE - time.perf_counter()))
            made.append(asyncio.create_task(turn(http, number)))
        return await asyncio.gather(*made)


def beside(port: int, calls: int, way: str, attacked: int) -> tuple[list[Turn], Counter[str]]:
    """The turns while the hostile tenant is at the port `attacked`, and what that one heard."""
    command = module("bench.tenants", "--attack", attacked, "--seconds", calls / RATE + 1, way)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as hostile:
        assert hostile.stdout is not None  # noqa: S101 - it is a pipe
        hostile.stdout.readline()
        made = uvloop.run(turns(port, calls))
        return made, Counter(json.loads(hostile.stdout.read()))


def quantile(made: list[Turn], stream: bool, share: float) -> float:
    ms = sorted(each.ms for each in made if each.stream == stream)
    return ms[int(len(ms) * share)]


def row(way: str, made: dict[Place, list[Turn]], heard: Counter[str]) -> str:
    cells = []
    for stream in (False, True):
        usual, worst = (
            {place: quantile(found, stream, share) for place, found in made.items()} for share in (0.5, 0.99)
        )
        cells += [f"{ms:.0f} / {worst[place]:.0f}" for place, ms in usual.items()]
        cells.append(f"{worst['beside'] / worst['alone']:.1f}")
    refusals = [each.refusal for found in made.values() for each in found if each.refusal]
    print(*refusals, sep="\n", file=sys.stderr)
    statuses = ", ".join(f"{status}: {number}" for status, number in sorted(heard.items()))
    return f"| {way} | {' | '.join(cells)} | {len(refusals)} | {statuses} | {os.getloadavg()[0]:.0f} |"


def measured(ways: list[str], full: bool, asked: argparse.Namespace) -> Iterator[str]:
    """The row of each way."""
    settings = {"WEIR_CLIENT_KEYS": f"{QUIET},{HOSTILE}"} | (FULL if full else {})
    with tempfile.TemporaryDirectory() as name:
        folder, load = Path(name), 0.5 if full else None
        model = make_tiny_model(folder / "model")
        with running_rig(model, folder, asked.pace_ms, 2, settings=settings, engine_load=load) as rig:
            (port, _), (other, _) = rig.gateways
            uvloop.run(turns(port, 2 * RATE))  # warm
            for way in ways:
                made: dict[Place, list[Turn]] = {place: [] for place in get_args(Place)}
                heard: Counter[str] = Counter()
                for _ in range(asked.rounds):
                    made["alone"] += uvloop.run(turns(port, asked.calls))
                    found, statuses = beside(port, asked.calls, way, port)
                    made["beside"] += found
                    heard += statuses
                    made["elsewhere"] += beside(port, asked.calls, way, other)[0]
                yield row(way, made, heard)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help="; ".join(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=200, help="of each part of a round")
    parser.add_argument("--pace-ms", type=float, default=5.0, help="the engine's time for a token")
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.attack:
        print(json.dumps(uvloop.run(attack(WAYS[asked.ways[0]], asked.attack, asked.seconds))))
        return
    parts = "alone | beside | elsewhere | ratio"
    print(f"| p50 / p99, ms | plain: {parts} | streamed: {parts} | refused | the hostile one heard | load |")
    print("|---" * 12 + "|", flush=True)
    for full in (False, True):
        ways = [way for way in asked.ways or WAYS if WAYS[way].full == full]
        for line in measured(ways, full, asked) if ways else ():
            print(line, flush=True)


if __name__ == "__main__":
    main()
