"""Samples the choices of one call side by side, and passes on their pieces as they arrive."""

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
OnPiece = Callable[[int, Piece | None], Awaitable[None]]


async def for_each(work: Callable[[Generation], Awaitable[T]], generations: Sequence[Generation]) -> list[T]:
    """Do the work for all choices at once. The first failure cancels the others, and is raised."""
    if len(generations) == 1:
        return [await work(generations[0])]
    tasks = [asyncio.ensure_future(work(generation)) for generation in generations]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await drain(tasks)


async def sample_each(sample: Sample, generations: Sequence[Generation], on_piece: OnPiece) -> None:
    """Call `on_piece` with each piece of an engine and the index of its choice, one at a time; with None at
    the end of a choice. The first failure cancels all choices, and is raised."""
    if len(generations) == 1:
        await sample(generations[0], partial(on_piece, 0))
        await on_piece(0, None)
        return
    pieces: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(maxsize=len(generations))

    async def sample_one(index: int, generation: Generation) -> None:
        end: Exception | None = None
        try:
            await sample(generation, lambda piece: pieces.put((index, piece)))
        except Exception as error:  # raised by the reader of the queue
            end = error
        await pieces.put((index, end))

    sampling = [asyncio.create_task(sample_one(*numbered)) for numbered in enumerate(generations)]
    try:
        running = len(sampling)
        while running:
            index, piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            running -= piece is None
            await on_piece(index, piece)
    finally:
        await drain(sampling)
