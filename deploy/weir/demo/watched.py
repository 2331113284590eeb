"""Plays episodes while a live view is drawn and the services are checked."""

import asyncio
from collections.abc import Callable

from rollout_queue import clock
from weir.demo.episodes import EpisodeLog, EpisodeRunner
from weir.demo.live import LiveView
from weir.demo.observer import Observer
from weir.stack.stack import Stack

CHECK_EVERY_S = 0.25


async def watched(
    stack: Stack, episodes: EpisodeRunner, observer: Observer, enough: Callable[[EpisodeLog], bool]
) -> EpisodeLog:
    """Play until `enough` returns True. Raises ServiceDied when a service ends before that."""
    view = LiveView(episodes.record, observer.snapshot)
    watching = asyncio.create_task(observer.watch())
    tending = asyncio.create_task(_refresh(stack, view, episodes.record, observer))
    playing = asyncio.create_task(episodes.play(enough))
    try:
        await asyncio.wait({playing, tending}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(stack.check)
        return await playing
    finally:
        for task in (playing, tending, watching):
            task.cancel()
        await asyncio.gather(playing, tending, watching, return_exceptions=True)


async def _refresh(stack: Stack, view: LiveView, record: EpisodeLog, observer: Observer) -> None:
    """Update the view and check the services, again and again. Raises ServiceDied."""
    with view.showing():
        while True:
            await asyncio.to_thread(stack.check)
            record.version = observer.snapshot.serving
            view.tick()
            await clock.sleep(CHECK_EVERY_S)
