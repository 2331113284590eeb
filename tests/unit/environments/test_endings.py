"""An episode has one outcome, also when it is cancelled in the moment in which it ends."""

import asyncio
from typing import Any

from environments.episodes.episode import EpisodePlayer, Seat
from environments.episodes.looped import LoopedEpisodes
from environments.step import Step
from environments.task import Task
from tests.support.environments.nothing import NoEnvironments

SEATS = [Seat(f"s{number}", {}, "policy", {}) for number in range(2)]


class SlowGateway:
    """Stands in for SessionClient; it stores an outcome when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()
        self.stored: list[tuple[str, str]] = []

    def model_client(self, session: Any) -> None: ...

    async def finish(self, session_id: str, status: str, *_: Any) -> None:
        self.asked.set()
        await self.go_on.wait()
        self.stored.append((session_id, status))


async def ends(*_: Any) -> Step:
    return Step(terminated=True)


async def test_an_episode_that_is_cancelled_while_it_ends_has_ended() -> None:
    gateway: Any = SlowGateway()
    looped = LoopedEpisodes(
        gateway, NoEnvironments(), ends, max_turns=1, time_limit_s=60, graded_elsewhere=True
    )
    player = EpisodePlayer(gateway, looped.play)
    playing = asyncio.create_task(player.play(Task("t", {}), SEATS, [{}, {}]))
    await gateway.asked.wait()
    playing.cancel()
    await asyncio.sleep(0)  # the cancellation arrives
    gateway.go_on.set()
    assert [each.status for each in await playing] == ["completed", "completed"]
    assert gateway.stored == [("s0", "completed"), ("s1", "completed")]
