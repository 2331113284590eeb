"""Asks the gateway which policy versions sampled the tokens of each episode."""

import asyncio
from collections.abc import Iterable

import msgspec

from environments.results.journal import EpisodeEnded
from environments.session_client import SessionClient

AT_ONCE = 16


async def with_versions(gateway: SessionClient, ended: Iterable[EpisodeEnded]) -> list[EpisodeEnded]:
    """The same episodes with their versions; one whose session is gone keeps what it has."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def asked(entry: EpisodeEnded) -> EpisodeEnded:
        async with slots:
            session = await gateway.session(entry.session_id)
        if session is None:
            return entry
        spans = {span["version"] for turn in session["turns"] for span in turn["versions"]}
        return msgspec.structs.replace(entry, versions=tuple(sorted(spans)))

    return list(await asyncio.gather(*(asked(each) for each in ended)))
