"""Plays groups of episodes against a gateway, many at once, and posts each reward over REST.

POST /groups ──▶ one task, `group_size` sessions ──▶ the agent plays each ──▶ POST …/finish with its reward
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

from rollout_queue import clock
from rollout_queue.http.callers import bearer
from weir.demo.task import Game, ToolGame
from weir.errors import StackError

WINDOW = 128
"""Episodes in the moving average of the reward."""


@dataclass(frozen=True)
class PlayedEpisode:
    """One finished episode. `version` is the policy version that was served when it ended."""

    seconds: float
    reward: float | None
    version: int | None
    failure: str | None = None


@dataclass
class EpisodeLog:
    """The episodes that were played so far."""

    started_at: float = field(default_factory=clock.monotonic)
    episodes: list[PlayedEpisode] = field(default_factory=list)
    window: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    in_flight: int = 0
    version: int | None = None
    reward_start: float | None = None
    """Mean reward of the first window."""

    @property
    def moving_average(self) -> float | None:
        return sum(self.window) / len(self.window) if len(self.window) == WINDOW else None

    @property
    def failures(self) -> int:
        return sum(episode.failure is not None for episode in self.episodes)

    def add(self, reward: float | None, failure: str | None) -> None:
        seconds = clock.monotonic() - self.started_at
        self.episodes.append(PlayedEpisode(seconds, reward, self.version, failure))
        if reward is not None:
            self.window.append(reward)
        if self.reward_start is None:
            self.reward_start = self.moving_average


class EpisodeRunner:
    """Plays episodes against a gateway until its caller has enough of them."""

    def __init__(
        self,
        gateway_url: str,
        client_key: str,
        *,
        group_size: int,
        groups_in_flight: int,
        seed: int,
        game: Game[Any] | None = None,
        train: bool = True,
        retry_every_s: float | None = None,
    ) -> None:
        """`game` defaults to the demo's game. If the gateway refuses a group, the runner asks again after
        `retry_every_s`; if that is None, after the time in the answer's header `retry-after`."""
        self.record = EpisodeLog()
        self._game: Game[Any] = game or ToolGame()
        self._train = train
        self._retry_every_s = retry_every_s
        self._gateway_url = gateway_url
        self._client_key = client_key
        self._group_size = group_size
        self._groups_in_flight = groups_in_flight
        self._random = Random(seed)

    async def play(self, enough: Callable[[EpisodeLog], bool]) -> EpisodeLog:
        """Keep groups in flight until `enough` returns True, then wait for the last ones to end.

        Raises StackError when the gateway does not answer.
        """
        try:
            await self._play(enough)
        except* httpx.HTTPError as errors:
            error = errors.exceptions[0]
            raise StackError(f"the gateway at {self._gateway_url} does not answer: {error!r}") from None
        return self.record

    async def _play(self, enough: Callable[[EpisodeLog], bool]) -> None:
        self.record.started_at = clock.monotonic()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = bearer(self._client_key)
        async with (
            httpx.AsyncClient(
                base_url=self._gateway_url, headers=headers, limits=limits, timeout=120
            ) as rest,
            AsyncOpenAI(base_url=f"{self._gateway_url}/v1", api_key=self._client_key, timeout=120) as client,
            asyncio.TaskGroup() as workers,
        ):
            for _ in range(self._groups_in_flight):
                workers.create_task(self._groups(rest, client, enough))

    async def _groups(
        self, rest: httpx.AsyncClient, client: AsyncOpenAI, enough: Callable[[EpisodeLog], bool]
    ) -> None:
        while not enough(self.record):
            tasks = self._game.group(self._random, self._group_size)
            tickets = await self._tickets(rest, self._game.task_id(tasks[0]), enough)
            pairs = zip(tasks, tickets, strict=False)  # `tickets` is empty if `enough` became true first
            await asyncio.gather(*(self._episode(rest, client, *pair) for pair in pairs))

    async def _tickets(
        self, rest: httpx.AsyncClient, task_id: str, enough: Callable[[EpisodeLog], bool]
    ) -> list[dict[str, str]]:
        """Open a group. Returns its sessions, with the URL and the key of each; nothing if `enough` becomes
        true before the gateway admits the group."""
        body = {"size": self._group_size, "task_id": task_id, "train": self._train}
        while not enough(self.record):
            reply = await rest.post("/groups", json=body)
            if reply.status_code in (429, 503):
                retry_after_s = float(reply.headers["retry-after"])
                await clock.sleep(retry_after_s if self._retry_every_s is None else self._retry_every_s)
                continue
            tickets: list[dict[str, str]] = reply.raise_for_status().json()["sessions"]
            return tickets
        return []

    async def _episode(
        self, rest: httpx.AsyncClient, client: AsyncOpenAI, task: Any, ticket: dict[str, str]
    ) -> None:
        self.record.in_flight += 1
        own = client.with_options(base_url=ticket["base_url"], api_key=ticket["api_key"])
        reward, failure = None, None
        try:
            reward = await self._game.play(own, task)
            ending = {"status": "completed", "reward": reward}
        except OpenAIError as error:
            failure = f"{type(error).__name__}: {error}"
            ending = {"status": "failed", "reason": failure[:200]}
        finally:
            self.record.in_flight -= 1
        await rest.post(f"/sessions/{ticket['session_id']}/finish", json=ending)
        self.record.add(reward, failure)
