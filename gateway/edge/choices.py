"""The choices of one call: sampled side by side, heard as they come."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from gateway.engines.engine import drain
from gateway.engines.failover import Hear
from gateway.engines.stream import Piece
from gateway.generations.generation import Generation

T = TypeVar("T")
Sample = Callable[[Generation, Hear], Awaitable[None]]
HearChoice = Callable[[int, Piece | None], Awaitable[None]]


async def each(work: Callable[[Generation], Awaitable[T]], generations: Sequence[Generation]) -> list[T]:
    """Do the work for every choice at once. The first failure ends the others, and is raised."""
    if len(generations) == 1:
        return [await work(generations[0])]
    tasks = [asyncio.ensure_future(work(generation)) for generation in generations]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await drain(tasks)


async def sample_each(sample: Sample, generations: Sequence[Generation], hear: HearChoice) -> None:
    """Let `hear` have what the engines say, one piece after the other, by choice; None for the end of a
    choice. The first failure ends all."""
    if len(generations) == 1:
        await sample(generations[0], partial(hear, 0))
        await hear(0, None)
        return
    said: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(maxsize=len(generations))

    async def listen(index: int, generation: Generation) -> None:
        end: Exception | None = None
        try:
            await sample(generation, lambda piece: said.put((index, piece)))
        except Exception as error:  # handed over to whoever reads the queue
            end = error
        await said.put((index, end))

    listening = [asyncio.create_task(listen(*numbered)) for numbered in enumerate(generations)]
    try:
        running = len(listening)
        while running:
            index, said_now = await said.get()
            if isinstance(said_now, Exception):
                raise said_now
            running -= said_now is None
            await hear(index, said_now)
    finally:
        await drain(listening)
