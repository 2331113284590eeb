"""Measures how long gateways and a rollout server disagree about the version that the server serves."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

from tests.support.gateway.push_system import PushSystem
from tests.support.threads import meanwhile

LOOK_EVERY_S = 0.02


@dataclass
class Disagreements:
    """The longest time, in seconds, for which each server and some gateway disagreed."""

    longest_s: dict[str, float] = field(default_factory=dict)
    agreed_at: dict[str, float] = field(default_factory=dict)
    longest_look_s: float = 0.0
    """How long it took to ask all gateways and servers, at most. Their polls take about as long."""

    def look(self, system: PushSystem) -> None:
        began = time.monotonic()
        said = {f"r{index}": server.status()["version"] for index, server in enumerate(system.servers)}
        believed = [gateway.server_versions() for gateway in system.gateways]
        now = time.monotonic()
        self.longest_look_s = max(self.longest_look_s, now - began)
        for name, version in said.items():
            if all(each[name] == version for each in believed):
                self.agreed_at[name] = now
            since_s = now - self.agreed_at.setdefault(name, now)
            self.longest_s[name] = max(self.longest_s.get(name, 0.0), since_s)


@contextmanager
def disagreements(system: PushSystem) -> Iterator[Disagreements]:
    """Look again and again while the block runs."""
    seen, over = Disagreements(), Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            seen.look(system)

    with meanwhile(over, watch):
        yield seen
