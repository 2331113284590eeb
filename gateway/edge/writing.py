"""Writes the parts of a reply that are long, without keeping other calls waiting."""

import asyncio
from collections.abc import Callable, Sequence
from typing import ParamSpec

from gateway.generations.generation import Generation

P = ParamSpec("P")

LOOP_LOGPROBS = 1024
"""A reply with more log-probabilities is written in a thread, because each takes a microsecond or two."""


async def written(
    generations: Sequence[Generation], write: Callable[P, bytes], *args: P.args, **kwargs: P.kwargs
) -> bytes:
    """Call `write`, which writes the whole answers of these generations; return its result."""
    if sum(map(_logprobs, generations)) <= LOOP_LOGPROBS:
        return write(*args, **kwargs)
    return await asyncio.to_thread(write, *args, **kwargs)


def _logprobs(generation: Generation) -> int:
    tops = generation.top_logprobs
    return len(generation.ids) * (1 + (len(tops[-1]) if tops else 0))
