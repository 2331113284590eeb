"""Runs published agents, each installed in its own environment, on a gateway with a scripted engine."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.agents.acting_engine import ActingEngine
from tests.support.clients.stack import Session, addresses, told
from tests.support.gateway.running import CLIENT_KEY

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ROOT / "run" / "agents"
SCENES = ROOT / "tests" / "agents"
SCENE_TIMEOUT_S = 300.0
"""Several agents start slowly, and the machine may be busy."""

PROGRAMS = ("node_modules/.bin", "node_modules/opencode-linux-x64/bin", "bin")
"""Where an environment has its programs."""

HERMETIC = {
    "NO_PROXY": "127.0.0.1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_CONFIGURED": "1",
}
"""Keeps agents from the network, apart from their calls to the gateway, and from asking the user."""


@dataclass
class RunningAgents:
    """The gateway as its agents see it, the engine behind it, and the folder in which the agents work."""

    url: str
    http: httpx.Client
    """Sends the admin key."""
    engine: ActingEngine
    work: Path

    def session(self, **body: Any) -> Session:
        return Session(self.http.post("/sessions", json=body).raise_for_status().json(), self.http)

    def sessions(self) -> list[Session]:
        """The sessions that have turns, the oldest first."""
        rows = self.http.get("/sessions", params={"limit": 1000}).raise_for_status().json()["data"]
        rows.sort(key=lambda row: row["created_at"])
        return [Session(row, self.http) for row in rows if row["turn_count"]]

    def play(
        self, agent: str, scene: str, session: Session | None = None, *, answers: dict[str, str], **more: str
    ) -> Any:
        """Run a scene of the agent, which knows only a base URL and a key; return what it printed last.

        Then check that each answer of the engine is recorded in exactly one turn, token for token.
        """
        self.engine.answers = answers
        environment = self._environment(agent, session) | more
        said = told([*_command(agent), scene], environment, SCENE_TIMEOUT_S, self.work)
        assert not self.engine.unexpected, f"{agent} {scene}: {said}"
        self.check_tokens()
        return said

    def check_tokens(self) -> None:
        sampled = [(each.prompt_ids, each.output_ids, each.logprobs) for each in self.engine.exchanges]
        recorded = [turn for session in self.sessions() for turn in exchanges_of(session)]
        assert len(recorded) == len(sampled)
        assert sorted(recorded) == sorted(sampled)

    def _environment(self, agent: str, session: Session | None) -> dict[str, str]:
        home = ENVIRONMENTS / agent
        base_url = session.ticket["base_url"] if session else f"{self.url}/v1"
        key = session.ticket["api_key"] if session else CLIENT_KEY
        path = ":".join([*(str(home / folder) for folder in PROGRAMS), os.environ["PATH"]])
        own = {"PATH": path, "LANG": "C.UTF-8", "HOME": str(self.work.with_name("home"))}
        return own | HERMETIC | addresses(base_url, key)


def kinds(session: Session) -> list[str]:
    """The relation of each turn to its session, with the reason where there is one: `forks sub_agent`."""
    session.story()
    return [" ".join(filter(None, (turn["relation"], turn["reason"]))) for turn in session.turns()]


def thoughtful(answers: dict[str, str]) -> dict[str, str]:
    """The same answers, each after a thought."""
    return {cue: f"<think>\nI know what to do.\n</think>\n\n{answer}" for cue, answer in answers.items()}


def exchanges_of(session: Session) -> list[tuple[list[int], list[int], list[float]]]:
    """The ids of the whole prompt, the ids of the output, and the logprobs of each turn."""
    found, ends = [], dict[str | None, list[int]]({None: []})
    for turn in session.turns():
        prompt_ids = ends[turn["parent_id"]] + turn["context_ids"]
        ends[turn["turn_id"]] = prompt_ids + turn["output_ids"]
        found.append((prompt_ids, turn["output_ids"], turn["logprobs"]))
    return found


def _command(agent: str) -> list[str]:
    home, scenes = ENVIRONMENTS / agent, SCENES / agent
    if (scenes / "play.sh").exists():
        return ["bash", str(scenes / "play.sh")]
    if (scenes / "play.py").exists():
        return [str(home / "bin" / "python"), str(scenes / "play.py")]
    # Node looks for packages beside the script, so the script is copied to where the packages are.
    script = shutil.copy(scenes / "play.js", home / "play.js")
    return [str(home / "node_modules" / ".bin" / "node"), str(script)]
