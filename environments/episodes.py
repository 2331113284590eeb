"""One episode: its sessions, with their names and what the gateway is to know of each, are opened; it is
played; and the gateway is told how it ended.

A library may play episodes itself: it gets the sessions of an episode, and says afterwards what became of
them, with a trace for each agent (`programs/play.py`).

session ids, task ──▶ host ──▶ library ──▶ its harness ──▶ calls of the sessions at the gateway
outcomes          ◀── traces with rewards by name ◀──┘
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from environments.environment import EpisodeOutcome, NamedReward, Task
from environments.errors import EnvironmentFault, SessionRefused
from environments.hosts import HostedLibrary
from environments.session_client import Patience, SessionClient
from environments.settings import RunSettings
from rollout_queue import clock

SOURCE = "environment"
"""Where the rewards of turns come from, as recorded sessions say."""


@dataclass(frozen=True)
class Seat:
    """One agent's place in an episode: its session, its model and its sampling parameters. An opponent's seat
    is not rewarded."""

    session_id: str
    description: dict[str, Any]
    model: str
    sampling: dict[str, Any]
    learns: bool = True

    @property
    def is_pinned(self) -> bool:
        """Whether one version alone answers its calls, or one adapter."""
        return any(mark in self.model for mark in "@:")


Plays = Callable[[Task, Sequence[Seat], Sequence[Mapping[str, Any]]], Awaitable[list[EpisodeOutcome]]]
"""Plays an episode of the task in the open sessions of its seats. Returns the outcome for each seat."""


class EpisodePlayer:
    """Plays episodes in sessions. `plays` is who plays them: an agent loop, or a library."""

    def __init__(self, gateway: SessionClient, plays: Plays) -> None:
        self._gateway, self._plays = gateway, plays
        self.patience = Patience()
        """How long outcomes are told to a gateway that does not take them."""

    async def open(self, seats: Sequence[Seat]) -> list[dict[str, Any]]:
        """Open the sessions of an episode. The same seats get the same sessions again."""
        return [
            await self._gateway.open_session(seat.session_id, seat.description, self.patience)
            for seat in seats
        ]

    async def play(
        self, task: Task, seats: Sequence[Seat], sessions: Sequence[Mapping[str, Any]]
    ) -> list[EpisodeOutcome]:
        """Play an episode in its open sessions. Returns the outcome for each seat, which the gateway has
        stored. Raises GatewayFault if it failed and its version is served no more: so would all others."""
        outcomes = await self._plays(task, seats, sessions)
        if any(outcome.status == "failed" for outcome in outcomes):
            for model in {seat.model for seat in seats if seat.is_pinned}:
                await self._gateway.check_model(model)
        return await self._tell_all(seats, outcomes)

    async def abandon(self, seats: Sequence[Seat], reason: str) -> list[EpisodeOutcome]:
        """End an episode that nobody needs any more."""
        outcomes = [EpisodeOutcome("abandoned", reason=reason) for _ in seats]
        return await self._tell_all(seats, outcomes)

    async def _tell_all(
        self, seats: Sequence[Seat], outcomes: Sequence[EpisodeOutcome]
    ) -> list[EpisodeOutcome]:
        """Tell how each seat's episode ended; returns what was stored. Who is cancelled meanwhile has ended,
        too: it is told to the end, because a session has one outcome."""

        async def tell() -> list[EpisodeOutcome]:
            return [await self._tell(*each) for each in zip(seats, outcomes, strict=True)]

        telling = asyncio.create_task(tell())
        try:
            return await asyncio.shield(telling)
        except asyncio.CancelledError:
            return await telling

    async def _tell(self, seat: Seat, outcome: EpisodeOutcome) -> EpisodeOutcome:
        """Store the rewards of a seat that learns, then how its episode ended. The session's verdict needs
        both."""
        try:
            if seat.learns:
                await self._reward(seat.session_id, outcome)
            final = outcome.final if seat.learns else None
            await self._gateway.finish(seat.session_id, outcome.status, final, outcome.reason, self.patience)
        except SessionRefused as error:  # it has expired or was deleted; other episodes go on
            return EpisodeOutcome("failed", reason=str(error), turns=outcome.turns)
        return outcome

    async def _reward(self, session_id: str, outcome: EpisodeOutcome) -> None:
        for number, turn in enumerate(outcome.turn_rewards):
            key = f"turn-{number}"
            await self._gateway.reward(session_id, key, turn.value, turn.turn_id, SOURCE, self.patience)
        for named in outcome.named:
            await self._gateway.reward(session_id, named.name, named.value, None, named.source, self.patience)


SPARE_S = 120.0
"""How much longer than an episode its session may last. A session that nobody ends expires after that."""
OF_SESSIONS = ("temperature", "top_p", "max_tokens")
"""The parameters that hold for a session, whatever its calls ask for."""


@dataclass(frozen=True)
class SeatPlan:
    """The same ids always name the same sessions, so every request of a runner can be repeated."""

    run_id: str
    settings: RunSettings
    model: str
    players: int
    frozen: Collection[int] = ()
    """The players that the environment never has learn."""

    def seats(self, task: Task, group: int, member: int, size: int, attempt: int) -> list[Seat]:
        """The seats of an episode. In a game with an opponent, one player learns: another one in each
        group."""
        learner = group % self.players if self.settings.opponent else None
        return [
            self._seat(
                task,
                group,
                member,
                size,
                attempt,
                player,
                learner in (None, player) and player not in self.frozen,
            )
            for player in range(self.players)
        ]

    def _seat(
        self, task: Task, group: int, member: int, size: int, attempt: int, player: int, learns: bool
    ) -> Seat:
        model = self.model if learns else self.settings.opponent or self.model
        again = f".r{attempt}" if attempt else ""
        trained = learns and self.settings.mode == "train"
        description: dict[str, Any] = {
            "task_id": task.id,
            "train": trained,
            "policy": model if "@" in model else None,
            "ttl_s": round(self.settings.episode_s + SPARE_S),
            "sampling": self._enforced() or None,
            "metadata": {
                "environment": self.settings.environment,
                "run": self.run_id,
                "group": group,
                "member": member,
                "player": player,
                **({"item": task.data["item"]} if "item" in task.data else {}),
            },
        }
        if trained or self.settings.mode == "eval":
            description |= {"group_id": f"{self.run_id}.{group}.{player}{again}", "group_size": size}
        given = {name: value for name, value in description.items() if value is not None}
        session_id = f"{self.run_id}.{group}.{member}.{player}{again}"
        return Seat(session_id, given, model, self._sampling(group, member), learns)

    def _enforced(self) -> dict[str, Any]:
        """What the settings name holds also where an environment's own program asks for something else. A
        temperature of 0 is left to the gateway: it has another one for answers that are trained."""
        named = {name: value for name in OF_SESSIONS if (value := self.settings.sampling.get(name))}
        return named if named.keys() <= {"max_tokens"} else {"mode": "enforce", **named}

    def _sampling(self, group: int, member: int) -> dict[str, Any]:
        """An evaluation gives each sample a seed of its own. Training does not: it needs other samples each
        time."""
        given = dict(self.settings.sampling)
        if self.settings.mode == "eval":
            given.setdefault("seed", (self.settings.seed * 1_000_003 + group * 1009 + member) % 2**31)
        return given


class PlayedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's rollout. Its calls belong to the session `session_id`."""

    session_id: str
    agent: str = "agent"
    trained: bool = True
    """Whether the environment wants the agent to learn."""
    ok: bool
    errors: tuple[str, ...] = ()
    truncated: bool = False
    late: bool = False
    """One of the library's own deadlines has expired."""
    stopped_by: str | None = None
    rewards: dict[str, float | None] = {}
    """Each reward times its weight. None means that it was not computed, which is not 0."""
    metrics: dict[str, float] = {}
    turns: int = 0


class PlayedTraces(msgspec.Struct, frozen=True, kw_only=True):
    """An episode is not `ok` unless all its traces are, and what the environment says of them all is."""

    ok: bool
    errors: tuple[str, ...] = ()
    traces: tuple[PlayedTrace, ...] = ()


def outcome_of_trace(
    played: PlayedTraces, session_id: str, learns: bool, source: str, graded_elsewhere: bool
) -> EpisodeOutcome:
    """The outcome of the session. What went wrong is never a reward of 0: the episode has failed, with the
    first error as its reason."""
    trace = next((each for each in played.traces if each.session_id == session_id), None)
    if trace is None:
        return EpisodeOutcome("failed", reason=_first(played.errors, "the agent did not play"))
    known = EpisodeOutcome("failed", turns=trace.turns, metrics=dict(trace.metrics))
    if why := _failure(played, trace, learns):
        return replace(known, reason=why)
    named = tuple(
        NamedReward(name, value, source) for name, value in trace.rewards.items() if value is not None
    )
    if trace.truncated:
        return replace(
            known, status="truncated", named=named, reason=trace.stopped_by or "an answer was cut off"
        )
    if not named and learns and not graded_elsewhere:
        return replace(known, reason="the environment gave no reward")
    return replace(known, status="completed", named=named)


def _failure(played: PlayedTraces, trace: PlayedTrace, learns: bool) -> str | None:
    """Why the trace must not be trained; None if it may."""
    if learns and not trace.trained:
        return f"the environment does not train the agent {trace.agent!r} in this episode"
    if not trace.ok:
        return _first(trace.errors, f"the rollout failed: {trace.stopped_by}")
    if trace.late:
        return f"a deadline of the library expired: {trace.stopped_by}"
    if not played.ok:
        others = [error for each in played.traces for error in each.errors]
        return f"the episode failed: {_first((*played.errors, *others), 'the library does not say why')}"
    if None in trace.rewards.values():
        missing = [name for name, value in trace.rewards.items() if value is None]
        return f"scoring did not run: {', '.join(missing)}"
    return None


def _first(errors: tuple[str, ...], otherwise: str) -> str:
    return errors[0] if errors else otherwise


Address = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
"""How the library reaches the model, from the sessions of an episode."""


class LibraryEpisodes:
    """Plays episodes of one library. `source` is what recorded sessions say of where rewards come from."""

    def __init__(
        self,
        library: HostedLibrary,
        address: Address,
        *,
        source: str,
        time_limit_s: float,
        graded_elsewhere: bool = False,
    ) -> None:
        self._library, self._address, self._source = library, address, source
        self._time_limit_s, self._graded_elsewhere = time_limit_s, graded_elsewhere

    async def play(
        self, task: Task, seats: Sequence[Seat], sessions: Sequence[Mapping[str, Any]]
    ) -> list[EpisodeOutcome]:
        given = {"data": task.data, "model": seats[0].model, "sampling": seats[0].sampling}
        try:
            async with clock.timeout(self._time_limit_s):
                said = await self._library.play(**given, **self._address(sessions))
            played = msgspec.convert(said, PlayedTraces)
        except TimeoutError:
            reason = f"the episode took longer than {self._time_limit_s:.0f} s"
            return [EpisodeOutcome("truncated", reason=reason) for _ in seats]
        except (EnvironmentFault, msgspec.ValidationError) as error:
            return [EpisodeOutcome("failed", reason=f"environment: {error}") for _ in seats]
        return [
            outcome_of_trace(played, seat.session_id, seat.learns, self._source, self._graded_elsewhere)
            for seat in seats
        ]


def one_address(url: str, key: str | None) -> Address:
    """The gateway's own address for all sessions: the library names the session in a header of each call."""

    def address(sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ids = [session["session_id"] for session in sessions]
        return {"sessions": ids, "base_url": f"{url}/v1", "api_key": key or "none"}

    return address


def own_addresses(sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The address and the key of each session."""
    return {
        "sessions": [
            {name: session[name] for name in ("session_id", "base_url", "api_key")} for session in sessions
        ]
    }
