"""Agents that play one episode after the other: they call, check what they hear, reward and finish."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from tests.soak.dialects import DIALECTS, Conversation, NotWhole, SpokenDialect
from tests.soak.engine import LETTERS
from tests.soak.hostile import Hostile
from tests.soak.journal import Journal
from tests.support.gateway.running import CLIENT_KEY

MOST_TURNS = 4
THINKS_S = 1.0
"""The mean pause before each call, so that two cores can serve all agents."""
HOSTILE = 0.05
"""How likely an agent makes a hostile call before one of its own."""
WANDERS = 0.2
"""The share of calls that go to another gateway than the one before."""
PATIENCE_S = 60.0
FIRST_LETTER = 33 + LETTERS[0]
TEXT = "".join(chr(FIRST_LETTER + letter - LETTERS[0]) for letter in LETTERS)
"""The engines' answer."""
HEADERS = {"authorization": f"Bearer {CLIENT_KEY}"}


class Agent:
    """One agent. After something unexpected, it reports that to the journal and begins a new episode."""

    def __init__(
        self, name: str, seed: int, gateways: Sequence[str], journal: Journal, http: aiohttp.ClientSession
    ) -> None:
        self._name, self._draw = name, random.Random(f"{seed}-{name}")
        self._gateways, self._gateway = gateways, self._draw_from(gateways)
        self._journal, self._http = journal, http
        self._hostile = Hostile(self._draw, journal)

    async def play(self, until: float) -> None:
        """Begin episodes until `until` (a time of `time.monotonic`), and play the last one to its end."""
        number = 0
        while time.monotonic() < until:
            number += 1
            session_id = f"{self._name}-{number}"
            try:
                await self._episode(session_id)
            except (
                aiohttp.ClientError,
                TimeoutError,
                NotWhole,
                AssertionError,
                ValueError,
                KeyError,
            ) as error:
                what = f"{session_id}: {type(error).__name__}: {error}"
                if "kills_engines" in what:
                    self._journal.refused.append(what)
                else:
                    self._journal.surprised(what)

    async def _episode(self, session_id: str) -> None:
        dialect = self._draw.choice(DIALECTS)
        await self._post("/sessions", {"session_id": session_id}, 201)
        conversation, heard = Conversation(), list[str]()
        for _ in range(self._draw.randint(1, MOST_TURNS)):
            await asyncio.sleep(self._draw.uniform(0, 2 * THINKS_S))  # an agent thinks, or its tool runs
            if self._draw.random() < HOSTILE:
                await self._hostile.call(self._gateway)
            if self._draw.random() < WANDERS:
                self._gateway = self._draw_from(self._gateways)
            heard += await self._turn(session_id, dialect, conversation)
        await self._post(f"/sessions/{session_id}/finish", {"status": "completed", "reward": 1.0}, 200)
        self._journal.finished(session_id)
        await self._compare(session_id, heard)

    async def _turn(self, session_id: str, dialect: SpokenDialect, conversation: Conversation) -> list[str]:
        """Make a call, and check its answer. Returns the ids of the turns that the answer names."""
        conversation.said.append(("user", f"say {self._draw.randint(0, 999)}"))
        tokens, stream = self._draw.randint(1, 2 * len(TEXT)), self._draw.random() < 0.5
        body = dialect.body(conversation, tokens, stream)
        began = time.monotonic()
        url = f"{self._gateway}/sessions/{session_id}{dialect.path}"
        async with self._http.post(url, json=body, headers=HEADERS) as reply:
            raw = await reply.read()
            turn_ids = reply.headers.get("x-weir-turn-id", "").split(",")
        self._journal.called(dialect.name, reply.status, time.monotonic() - began)
        assert reply.status == 200, f"{dialect.name}: {reply.status} {raw[:300]!r}"
        text, conversation.reply_id = dialect.read(raw, stream)
        self._journal.heard(session_id, turn_ids)
        assert text == TEXT[:tokens], f"{dialect.name}, {tokens} tokens: {text!r}"
        conversation.said.append(("assistant", text))
        return turn_ids

    async def _compare(self, session_id: str, heard: list[str]) -> None:
        """Check that the session's turns, apart from aborted ones, are the answers that the agent heard."""
        url = f"{self._gateway}/sessions/{session_id}"
        async with self._http.get(url, headers=HEADERS) as reply:
            view: dict[str, Any] = await reply.json()
        turns = [turn["turn_id"] for turn in view["turns"] if turn["finish_reason"] != "abort"]
        assert turns == heard, f"heard {heard}, recorded {turns}"

    async def _post(self, path: str, body: dict[str, Any], expected: int) -> None:
        async with self._http.post(self._gateway + path, json=body, headers=HEADERS) as reply:
            text = await reply.text()
        self._journal.called("rest", reply.status)
        assert reply.status == expected, f"{path}: {reply.status} {text[:300]}"

    def _draw_from(self, gateways: Sequence[str]) -> str:
        return self._draw.choice(gateways)
