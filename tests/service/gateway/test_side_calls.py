"""Requests that an agent's harness makes for itself are recognized, and may stay untrained."""

from typing import Any

from tests.support.gateway.running import Backends, RunningGateway

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
FIX = {"role": "user", "content": "fix the bug"}
CLAUDE = "You are Claude Code, Anthropic's official CLI for Claude."
TITLE = (
    "Generate a concise, sentence-case title (3-7 words) that captures the main topic or goal of this coding"
    ' session. Return JSON with a single "title" field.'
)
TOPIC = "Analyze if this message indicates a new conversation topic. If it does, extract a 2-3 word title."
COMPACT = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nYour task is to create a detailed summary of"
    " the conversation so far, paying close attention to the user's explicit requests."
)
HISTORY = [FIX, {"role": "assistant", "content": "hello"}]
CODEX = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM."
CODEX_TITLE = (
    "You are a helpful assistant. You will be presented with a user prompt, and your job is to provide a"
    " short title for a task that will be created from that prompt.\n\nUser prompt:\nfix the bug"
)
NAMING = "You are naming a coding session so the user can pick it out of a long list of sessions."
OPENCODE = "You are a title generator. You output ONLY a thread title. Nothing else."
ANCHORED = "You are an anchored context summarization assistant for coding sessions."


def blocks(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def claude(system: Any, messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    given = {"model": "claude", "max_tokens": 64, "messages": messages, **more}
    return "messages", given | ({"system": system} if system else {})


def codex(*said: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}]
    return "responses", {"instructions": "You are Codex.", "input": list(said), "tools": tools}


def opencode(system: str, *said: str, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": system}, *({"role": "user", "content": text} for text in said)]
    return "chat/completions", {"messages": messages, **more}


SIDE_CALLS: dict[str, tuple[str, tuple[str, dict[str, Any]]]] = {
    "claude code's quota": ("quota", claude(None, [{"role": "user", "content": "quota"}], max_tokens=1)),
    "claude code's title": ("title", claude(blocks(CLAUDE, TITLE), [FIX])),
    "the claude agent sdk's title": ("title", claude(blocks(CLAUDE, NAMING), [FIX])),
    "claude code's topic": ("topic", claude(blocks(CLAUDE, TOPIC), [FIX])),
    "claude code's summary": (
        "summary",
        claude(blocks(CLAUDE, "Use tools."), [*HISTORY, {"role": "user", "content": blocks(COMPACT)}]),
    ),
    "codex's title": ("title", codex({"role": "user", "content": CODEX_TITLE})),
    "codex's summary": ("summary", codex(*HISTORY, {"role": "user", "content": CODEX})),
    "opencode's title": ("title", opencode(OPENCODE, "Generate a title for this conversation:\n", "fix it")),
    "opencode's summary": ("summary", opencode(ANCHORED, "Create a new anchored summary.")),
}
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a classifier of one token": claude("Answer A or B.", [FIX], max_tokens=1),
    "a conversation about titles": opencode("You are an agent.", f"why does it say {OPENCODE!r}?"),
    "an agent with tools that quotes a title's prompt": opencode(f"Test this: {OPENCODE}", "go", tools=TOOLS),
    "an agent that goes on after a summary": opencode("You are an agent.", COMPACT[:56], "go on"),
}


def asked(gateway: RunningGateway, session: dict[str, Any], call: tuple[str, dict[str, Any]]) -> None:
    path, body = call
    reply = gateway.post(f"/sessions/{session['session_id']}/v1/{path}", body)
    assert reply.status_code == 200, reply.text


def finished(gateway: RunningGateway, session: dict[str, Any]) -> list[dict[str, Any]]:
    gateway.finish(session, reward=1.0)
    return gateway.turns(session)


def test_a_side_call_is_recorded_with_its_kind_and_not_trained_if_the_session_says_so(
    gateway: RunningGateway,
) -> None:
    for name, (kind, call) in SIDE_CALLS.items():
        session = gateway.session(train_side_calls=False)
        asked(gateway, session, call)
        asked(gateway, session, opencode("You are an agent.", "fix the bug", tools=TOOLS))
        side, main = finished(gateway, session)
        assert (side["side_call"], side["verdict"]["code"]) == (kind, "not_for_training"), name
        assert side["verdict"]["detail"] == f"a {kind} that the agent's harness asked for"
        assert side["output_ids"], "its tokens are recorded"
        assert (main["side_call"], main["verdict"]["code"]) == (None, "ready"), name


def test_a_call_of_the_agent_itself_is_trained(gateway: RunningGateway) -> None:
    for name, call in AGENTS.items():
        session = gateway.session(train_side_calls=False)
        asked(gateway, session, call)
        (turn,) = finished(gateway, session)
        assert (turn["side_call"], turn["verdict"]["code"]) == (None, "ready"), name


def test_side_calls_are_trained_unless_the_session_or_the_deployment_says_otherwise(
    gateway: RunningGateway, backends: Backends
) -> None:
    _, call = SIDE_CALLS["opencode's title"]

    def verdict(at: RunningGateway, **body: Any) -> tuple[str, str]:
        session = at.session(**body)
        asked(at, session, call)
        (turn,) = finished(at, session)
        return turn["side_call"], turn["verdict"]["code"]

    assert verdict(gateway) == ("title", "ready")
    with backends.gateway(train_side_calls=False) as other:
        assert verdict(other) == ("title", "not_for_training")
        assert verdict(other, train_side_calls=True) == ("title", "ready")
        assert verdict(other, train_side_calls=None) == ("title", "not_for_training")


def test_an_export_names_side_calls(gateway: RunningGateway) -> None:
    session = gateway.session(train_side_calls=False)
    asked(gateway, session, SIDE_CALLS["claude code's quota"][1])
    finished(gateway, session)
    (row,) = gateway.get("/admin/export", key="admin-key").text.splitlines()
    assert '"side_call":"quota"' in row
    assert '"train_side_calls":false' in row
