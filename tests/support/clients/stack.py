"""Runs public client libraries, each installed in its own environment, on one real stack."""

import json
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ROOT / "run" / "clients"
CLIENT_KEY, ADMIN_KEY = "clients-client", "clients-admin"
SCENE_TIMEOUT_S = 120.0
SHARP = 0.2
"""The sampling temperature. At 1, the small model errs now and then. A test could not tell such an answer
from one that the gateway gave to the wrong client."""


HERMETIC = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Keeps clients from the network, apart from their calls to the gateway."""


def told(
    command: Sequence[str | Path], environment: Mapping[str, str], timeout_s: float, cwd: Path | None = None
) -> Any:
    """Run a user's program, which knows this environment alone; return what it printed last, as JSON."""
    done = subprocess.run(
        command,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def inherited() -> dict[str, str]:
    """What programs know of this machine."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def addresses(base_url: str, key: str) -> dict[str, str]:
    """The variables in which SDKs look for their server."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
    }


@dataclass(frozen=True)
class Session:
    """One session, as its owner sees it through the gateway's routes."""

    ticket: dict[str, Any]
    http: httpx.Client

    @property
    def session_id(self) -> str:
        return str(self.ticket["session_id"])

    def view(self) -> Any:
        return self.http.get(f"/sessions/{self.session_id}?tokens=true&text=true").raise_for_status().json()

    def turns(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.view()["turns"]
        return found

    def story(self) -> list[tuple[str, str]]:
        """The relation and finish reason of each turn. Checks that each token has a logprob and version 0."""
        turns = self.turns()
        for turn in turns:
            assert turn["output_len"] == len(turn["output_ids"]) == len(turn["logprobs"]) > 0
            assert turn["versions"] == [{"version": 0, "start": 0, "end": turn["output_len"]}]
        return [(turn["relation"], turn["finish_reason"]) for turn in turns]

    def end(self, reward: float) -> str:
        """Finish the session with a reward; return the code of its verdict."""
        body = {"status": "completed", "reward": reward}
        reply = self.http.post(f"/sessions/{self.session_id}/finish", json=body).raise_for_status()
        return str(reply.json()["verdict"]["code"])


@dataclass
class Figures:
    """What one client did, for the summary at the end of the test run."""

    scenes: int = 0
    turns: int = 0
    seconds: float = 0.0


@dataclass
class RunningStack:
    """The running stack, as a client sees it."""

    url: str
    http: httpx.Client
    figures: dict[str, Figures] = field(default_factory=dict)

    def session(self, **body: Any) -> Session:
        return Session(self.http.post("/sessions", json=body).raise_for_status().json(), self.http)

    def sessions(self, **query: Any) -> list[Session]:
        rows = self.http.get("/sessions", params={"limit": 1000, **query}).raise_for_status().json()["data"]
        return [Session(row, self.http) for row in rows]

    def session_of(self, session_id: str) -> Session:
        (found,) = [each for each in self.sessions() if each.session_id == session_id]
        return found

    def exported(self) -> dict[str, list[dict[str, Any]]]:
        """The recorded turns of each session, the oldest first."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        lines = httpx.get(f"{self.url}/admin/export?format=jsonl", headers=headers, timeout=60).text
        turns = defaultdict(list)
        for turn in sorted(map(json.loads, lines.splitlines()), key=lambda turn: float(turn["created_at"])):
            turns[turn["session_id"]].append(turn)
        return turns

    def play(
        self,
        client: str,
        scene: str,
        session: Session | None = None,
        *,
        url: str = "",
        timeout_s: float = SCENE_TIMEOUT_S,
        **more: str,
    ) -> Any:
        """Run a scene of a client; return what it printed last. The client knows only a base URL and a key.

        `url` replaces the gateway's own URL, e.g. by that of a proxy. `more`: variables of its environment.
        """
        before = self._turns()
        started = time.monotonic()
        base_url = session.ticket["base_url"] if session else f"{self.url}/v1"
        key = session.ticket["api_key"] if session else CLIENT_KEY
        environment = inherited() | HERMETIC | addresses(base_url, key) | more
        if url:
            environment = {name: value.replace(self.url, url) for name, value in environment.items()}
        said = told([*_command(client), scene], environment, timeout_s)
        figures = self.figures.setdefault(client, Figures())
        figures.scenes += 1
        figures.turns += self._turns() - before
        figures.seconds += time.monotonic() - started
        return said

    def _turns(self) -> int:
        rows = self.http.get("/sessions", params={"limit": 1000}).raise_for_status().json()["data"]
        return sum(row["turn_count"] for row in rows)


def _command(client: str) -> list[str]:
    home, script = ENVIRONMENTS / client, ROOT / "tests" / "clients" / client
    if (script / "package.json").exists():
        # Node looks for packages beside the script, so the script is copied to where the packages are.
        node = str(home / "node_modules" / ".bin" / "node")
        return [node, str(shutil.copy(script / "play.js", home / "play.js"))]
    if (script / "play.sh").exists():
        return ["bash", str(script / "play.sh")]
    return [str(home / "bin" / "python"), str(script / "play.py")]
