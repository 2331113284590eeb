"""Samples the choices (answers) of one call concurrently, and passes on their chunks as they arrive."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from gateway.cancellation import cancel_and_wait
from gateway.fleet.event_stream import OutputChunk
from gateway.fleet.failover import OnChunk
from gateway.generations.generation import Generation

T = TypeVar("T")
Arrived = tuple[int, OutputChunk | Exception | None]
"""The index of a choice, and its next chunk, its failure, or None for its end."""
Sample = Callable[[Generation, OnChunk], Awaitable[None]]
OnChoiceChunk = Callable[[int, OutputChunk | None], Awaitable[None]]


async def for_each(work: Callable[[Generation], Awaitable[T]], generations: Sequence[Generation]) -> list[T]:
    """Run `work` for all choices concurrently. The first failure cancels the others, and is raised."""
    if len(generations) == 1:
        return [await work(generations[0])]
    tasks = [asyncio.ensure_future(work(generation)) for generation in generations]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_and_wait(tasks)


async def sample_each(sample: Sample, generations: Sequence[Generation], on_chunk: OnChoiceChunk) -> None:
    """Sample all choices. Calls `on_chunk`, one call at a time, with a choice's index and its next chunk, or
    with None at its end. The first failure cancels all choices, and is raised."""
    if len(generations) == 1:
        await sample(generations[0], partial(on_chunk, 0))
        await on_chunk(0, None)
        return
    chunks: asyncio.Queue[Arrived] = asyncio.Queue(maxsize=len(generations))

    async def sample_one(index: int, generation: Generation) -> None:
        end: Exception | None = None
        try:
            await sample(generation, lambda chunk: chunks.put((index, chunk)))
        except Exception as error:  # raised by the loop below, which reads the queue
            end = error
        await chunks.put((index, end))

    sampling = [asyncio.create_task(sample_one(*numbered)) for numbered in enumerate(generations)]
    try:
        running = len(sampling)
        while running:
            index, chunk = await chunks.get()
            if isinstance(chunk, Exception):
                raise chunk
            running -= chunk is None
            await on_chunk(index, chunk)
    finally:
        await cancel_and_wait(sampling)
