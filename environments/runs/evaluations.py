"""Evaluations of a training run: one before it, of one version, and after every so many new versions another
one, beside the training.

RUN/evaluations/00012/   run.json   journal.jsonl   summary.json   reward.png   begun at version 12
"""

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.errors import EnvironmentFault, GatewayFault, RunStopped, UnknownEnvironment
from environments.results.journal import write_document
from environments.session_client import SessionClient

logger = logging.getLogger(__name__)

Judge = Callable[[Path, bool], Awaitable[dict[str, Any]]]
"""Plays an evaluation in a directory, of the version that the directory names alone if the flag is set. It
goes on with the one that is there. Returns its summary."""


@dataclass
class EvaluationSchedule:
    """One evaluation at a time. What comes due meanwhile begins after it, with the version of that moment.

    The first one is played before the training has an episode, which could make a new version meanwhile, and
    all its calls are pinned to its version, which others may train."""

    gateway: SessionClient
    directory: Path
    every: int
    judge: Judge
    running: bool = False

    async def before(self) -> Path | None:
        """The directory of the evaluation that comes before the training, unless it has been played. Raises
        GatewayFault."""
        begun = self._begun()
        if begun:
            return begun[0] if len(begun) == 1 and not _has_ended(begun[0]) else None
        version = await self.gateway.served_version()
        return None if version is None else self.directory / f"{version:05d}"

    async def due(self, session_id: str) -> Path | None:
        """The directory of an evaluation that is to begin now; `session_id` is one of the training, and says
        which version answers. An evaluation that a killed runner left comes first. Raises GatewayFault."""
        if self.running:
            return None
        begun = self._begun()
        if begun and not _has_ended(begun[-1]):
            found = begun[-1]
        else:
            version = await self.gateway.newest_version(session_id)
            if self.running or version is None or (begun and version < int(begun[-1].name) + self.every):
                return None
            found = self.directory / f"{version:05d}"
        self.running = True
        return found

    async def play(self, directory: Path, pinned: bool = False) -> None:
        """Play it. One that cannot be played is told, and the training goes on."""
        self.running = True
        try:
            await self.judge(directory, pinned)
        except (EnvironmentFault, GatewayFault, RunStopped, UnknownEnvironment) as error:
            logger.warning("the evaluation in %s ended early: %s", directory, error)
            write_document(directory / "summary.json", {"error": str(error)})
        finally:
            self.running = False

    def _begun(self) -> list[Path]:
        return sorted(self.directory.glob("[0-9]*"))


def _has_ended(directory: Path) -> bool:
    return (directory / "summary.json").exists()


def evaluations_in(directory: Path) -> list[dict[str, Any]]:
    """What the evaluations of a run have found, by version: the mean reward with its interval, and which
    versions sampled how many episodes."""
    found: list[dict[str, Any]] = []
    for path in sorted(directory.glob("[0-9]*/summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        told = {name: summary[name] for name in ("reward", "versions", "error") if name in summary}
        found.append({"version": int(path.parent.name), **told})
    return found
