"""Names the sessions of a run's episodes, and says what the gateway is to know of each."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from environments.episodes.episode import Seat
from environments.settings import RunSettings
from environments.task import Task

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
