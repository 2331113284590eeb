"""Continues a conversation as an agent does, and reads the turns of its session from the stream."""

from typing import Any

import httpx

from rollout_queue.contract.codec import decode
from rollout_queue.contract.outcomes import orphans_of
from rollout_queue.contract.records import Turn
from rollout_queue.redis import key_names
from tests.support.gateway.running import RunningGateway


def path_of(session: dict[str, Any]) -> str:
    return f"/sessions/{session['session_id']}/v1/chat/completions"


def say(gateway: RunningGateway, session: dict[str, Any], history: list[dict[str, Any]]) -> httpx.Response:
    """Continue the conversation. Each call has its own HTTP client, because several threads call."""
    headers = {"authorization": f"Bearer {session['api_key']}"}
    reply = httpx.post(
        gateway.url + path_of(session), json={"messages": history}, headers=headers, timeout=120
    )
    assert reply.status_code == 200, reply.text
    return reply


def answered(history: list[dict[str, Any]], reply: httpx.Response) -> list[dict[str, Any]]:
    """The conversation with the answer appended, and then the agent's next message."""
    return [*history, reply.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]


def stored(gateway: RunningGateway, session: dict[str, Any]) -> list[Turn]:
    """The session's turns as the trainer reads them from the stream."""
    entries: Any = gateway.redis.xrange(key_names.STREAM)
    records = [decode(fields[b"r"]) for _, fields in entries]
    return [each for each in records if isinstance(each, Turn) and each.session_id == session["session_id"]]


def recorded(gateway: RunningGateway, session_id: str) -> list[Turn]:
    """The session's turns, oldest first."""
    fields: Any = gateway.redis.hgetall(key_names.session(session_id))
    turns = [decode(value) for name, value in fields.items() if name.startswith(b"t:")]
    return sorted((turn for turn in turns if isinstance(turn, Turn)), key=lambda turn: turn.started_at)


def trainable(gateway: RunningGateway, session: dict[str, Any]) -> list[Turn]:
    turns = stored(gateway, session)
    orphans = orphans_of(turns)
    return [turn for turn in turns if turn.turn_id not in orphans and turn.finish != "abort"]
