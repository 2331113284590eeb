"""Which server a registration comes from: one that started again, or a second one in its place."""

from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import pytest

from gateway.engines.client import EngineClient
from gateway.engines.fleet_server import Registration
from gateway.engines.identities import distinct
from gateway.errors import StateConflict


@dataclass
class Answers:
    """The processes that answer at their URLs."""

    statuses: dict[str, bytes]

    async def get(self, url: str, timeout_s: float, headers: object = None) -> bytes:
        if url not in self.statuses:
            raise aiohttp.ClientError("nobody answers")
        return self.statuses[url]


def server(
    name: str, process: str | None, url: str = "http://r", displaced: tuple[str, ...] = ()
) -> Registration:
    return Registration(id=name, url=url, engine_url=f"{url}:1", process=process, displaced=displaced)


async def stored(
    new: Registration, *known: Registration, **statuses: bytes
) -> tuple[tuple[str, ...], list[str]]:
    engine = cast(
        EngineClient, cast(Any, Answers({f"http://{name}/status": s for name, s in statuses.items()}))
    )
    registration, taken = await distinct(new, known, engine, {})
    return registration.displaced, taken


async def test_a_server_that_started_again_takes_its_own_place() -> None:
    assert await stored(server("a", "p2"), server("a", "p1")) == (("p1",), [])


async def test_a_server_with_a_new_name_takes_the_place_of_the_former_one_at_its_url() -> None:
    former = server("a", "p2", displaced=("p1",))
    assert await stored(server("b", "p3"), former, server("c", "p9", "http://other")) == (("p1", "p2"), ["a"])


async def test_a_process_that_registers_again_takes_nobodys_place() -> None:
    assert await stored(server("a", "p1"), server("a", "p1")) == ((), [])
    assert await stored(server("a", None), server("a", None, displaced=("p1",))) == (("p1",), [])


async def test_a_process_whose_place_was_taken_is_a_second_server() -> None:
    with pytest.raises(StateConflict, match="the id a"):
        await stored(server("a", "p1"), server("a", "p2", displaced=("p1",)))


async def test_a_server_that_still_answers_keeps_its_place() -> None:
    status = b'{"process": "p1", "state": "ready", "version": 1}'
    with pytest.raises(StateConflict, match="the URL http://r"):
        await stored(server("b", "p2"), server("a", "p1"), r=status)
    assert await stored(server("b", "p3"), server("a", "p2"), r=status) == (("p2",), ["a"])
