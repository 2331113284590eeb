"""Agents that play one episode after another, and write down each success that the gateway tells them of."""

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx

GROUP_SIZE = 4
MOST_TURNS = 3
PATIENCE_S = 120.0
"""How long an agent repeats a failing call before it gives up its episode."""
THINKS_S = 0.15
"""The mean pause before each call, so that two cores can train all that the agents produce."""
KEEP_OPEN = 0.05
"""The share of sessions that no agent finishes; they expire."""


class GaveUp(Exception):
    """No answer came for too long, or the session has ended meanwhile."""


class Agents:
    """Threads of agents, used as a context manager. Each plays one group of episodes after the other."""

    def __init__(self, gateway_url: str, key: str, answers: Path, seed: int, count: int = 4) -> None:
        self._gateway_url, self._key = gateway_url, key
        self._answers = answers.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self.in_flight = 0
        self.counts = {"turns": 0, "rewards": 0, "finishes": 0, "retries": 0, "given up": 0}
        self._threads = [
            threading.Thread(target=self._play, args=(random.Random(f"{seed}-{number}"), f"a{seed}-{number}"))
            for number in range(count)
        ]

    def __enter__(self) -> "Agents":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Lets each agent end its group first, so that the group can be trained."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self._answers.close()

    @property
    def heard(self) -> int:
        """How many successes the agents have written down."""
        return sum(self.counts[what] for what in ("turns", "rewards", "finishes"))

    def _play(self, draw: random.Random, name: str) -> None:
        with httpx.Client(
            base_url=self._gateway_url, headers={"authorization": f"Bearer {self._key}"}, timeout=30
        ) as client:
            number = 0
            while not self._ending.is_set():
                number += 1
                try:
                    self._group(client, draw, f"{name}-{number}")
                except GaveUp:
                    self._count("given up")

    def _group(self, client: httpx.Client, draw: random.Random, group_id: str) -> None:
        for member in range(GROUP_SIZE):
            session_id = f"{group_id}-{member}"
            body = {"session_id": session_id, "group_id": group_id, "group_size": GROUP_SIZE, "ttl_s": 90}
            self._ask(client, "/sessions", body)
            try:
                self._episode(client, draw, session_id)
            except GaveUp:
                self._count("given up")

    def _episode(self, client: httpx.Client, draw: random.Random, session_id: str) -> None:
        messages: list[dict[str, str]] = []
        for _ in range(draw.randint(1, MOST_TURNS)):
            time.sleep(draw.uniform(0, 2 * THINKS_S))  # an agent thinks, or its tool runs
            messages.append({"role": "user", "content": f"say {draw.randint(0, 999)}"})
            messages.append(self._call(client, draw, session_id, messages))
        if draw.random() < KEEP_OPEN:
            return
        if draw.random() < 0.3:
            reward = {"value": draw.random(), "key": "early"}
            self._ask(client, f"/sessions/{session_id}/reward", reward)
            self._remember("rewards", session_id=session_id, reward_key="early")
        ending = {"status": draw.choices(["completed", "failed"], [19, 1])[0], "reward": draw.random()}
        self._ask(client, f"/sessions/{session_id}/finish", ending)
        self._remember("finishes", session_id=session_id, reward_key="finish", finished=True)

    def _call(
        self, client: httpx.Client, draw: random.Random, session_id: str, messages: list[dict[str, str]]
    ) -> dict[str, str]:
        body: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": draw.randint(2, 12)}
        if draw.random() < 0.4:
            body["stream"] = True
        reply = self._ask(client, f"/sessions/{session_id}/v1/chat/completions", body, retries=True)
        self._remember("turns", session_id=session_id, turn_id=reply.headers["x-weir-turn-id"])
        if "stream" not in body:
            return {"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"] or ""}
        chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
        said = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
        return {"role": "assistant", "content": "".join(said)}

    def _ask(
        self, client: httpx.Client, path: str, body: dict[str, Any], *, retries: bool = False
    ) -> httpx.Response:
        """Call until it succeeds. From the second try on, a model call is marked as a retry, as SDKs do."""
        began, attempt = time.monotonic(), 0
        while True:
            marks = {"x-stainless-retry-count": str(attempt)} if retries and attempt else {}
            with self._lock:
                self.in_flight += 1
            try:
                reply = client.post(path, json=body, headers=marks)
                if reply.status_code < 300 and whole(reply):
                    return reply
                if reply.status_code in (404, 409, 410):
                    raise GaveUp(reply.text)
            except httpx.HTTPError:
                pass
            finally:
                with self._lock:
                    self.in_flight -= 1
            if time.monotonic() - began > PATIENCE_S:
                raise GaveUp(path)
            attempt += 1
            self._count("retries")
            time.sleep(min(0.1 * 2**attempt, 2.0))  # before the next attempt

    def _remember(self, what: str, **answer: str | bool) -> None:
        with self._lock:
            self.counts[what] += 1
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def whole(reply: httpx.Response) -> bool:
    """Whether the answer is complete; a stream is complete if its last line says so."""
    streamed = reply.headers["content-type"].startswith("text/event-stream")
    return not streamed or reply.text.rstrip().endswith("data: [DONE]")
