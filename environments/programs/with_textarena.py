"""`textarena:ID`: a game of one or more players, each of which reads what concerns it since its last move.

The library draws from Python's process-wide random numbers, and each game has a process of its own.
"""

import random
from importlib.metadata import version
from typing import Any

import host_answers
import textarena

GAME = -1
"""The sender of what the game itself says."""


def environments(name: str, options: dict[str, Any]) -> "Games":
    return Games(name, options)


class Games:
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name, self._players = name, int(options.pop("players", 2))
        self._options = options
        textarena.make(name, **options)  # an unknown name is an error now

    def describe(self) -> dict[str, Any]:
        return {"name": f"textarena:{self._name}", "version": version("textarena"), "players": self._players}

    def tasks(self, seed: int, start: int, count: int) -> list[dict[str, Any]]:
        return host_answers.seeded_tasks(seed, start, count)

    def new(self) -> "PlayedGame":
        return PlayedGame(textarena.make(self._name, **self._options), self._players)


class PlayedGame:
    def __init__(self, game: Any, players: int) -> None:
        self._game, self._players = game, players

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        random.seed(data["seed"])
        self._game.reset(num_players=self._players, seed=data["seed"])
        return self._turn()

    def step(self, answer: str) -> dict[str, Any]:
        ended, _ = self._game.step(answer)
        if not ended:
            return self._turn()
        rewards, _ = self._game.close()
        return host_answers.step(None, terminated=True, rewards=rewards)

    def close(self) -> None:
        """A game that has not ended holds nothing open."""

    def _turn(self) -> dict[str, Any]:
        player, observed = self._game.get_observation()
        return host_answers.step(text_of(observed, player), player=player)


def text_of(observed: Any, player: int) -> str:
    """What the player reads. Its own moves are already in its conversation, as its answers."""
    if isinstance(observed, str):  # a wrapper of the library has joined the observations
        return observed
    told = (
        f"{text}" if sender == GAME else f"[Player {sender}] {text}"
        for sender, text, _ in observed
        if sender != player
    )
    return "\n".join(told)
