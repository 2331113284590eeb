"""The program of an `anthropic` user. The SDK takes base URL and key from the environment."""

import json
import sys

import anthropic
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

WORLD = {"c": "7", "d": "3"}
TOOL = {
    "name": "get",
    "description": "Gets the value of a key.",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}
MODEL = "claude-sonnet-4-5"


def get(key):
    return f"{key} = {WORLD.get(key, 'nothing')}"


def results_of(message):
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": get(**block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def ask(client, messages, question, **more):
    messages.append({"role": "user", "content": question})
    while True:
        message = client.messages.create(model=MODEL, max_tokens=64, messages=messages, tools=[TOOL], **more)
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return text_of(message)
        messages.append({"role": "user", "content": results_of(message)})


def tool_loop():
    return {"answer": ask(Anthropic(), [], "value of c?")}


def parallel_calls():
    messages = []
    answer = ask(Anthropic(), messages, "value of c and d?")
    return {"answer": answer, "calls": [block.input for block in messages[1]["content"]]}


def conversation():
    """As in Claude Code, the system prompt is a list of blocks, and the cache mark moves with each turn."""
    client, messages = Anthropic(), []
    system = [
        {"type": "text", "text": "You are a helpful assistant.", "cache_control": {"type": "ephemeral"}}
    ]
    answers = []
    for key in "cd":
        question = {"type": "text", "text": f"value of {key}?", "cache_control": {"type": "ephemeral"}}
        answers.append(ask(client, messages, [question], system=system))
        messages[-4]["content"] = f"value of {key}?"
    return {"answers": answers}


def stream():
    client, messages = Anthropic(), [{"role": "user", "content": "value of c and d?"}]
    seen, streamed = set(), ""
    while True:
        with client.messages.stream(model=MODEL, max_tokens=64, messages=messages, tools=[TOOL]) as events:
            for event in events:
                seen.add(event.type)
                streamed += event.text if event.type == "text" else ""
            message = events.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            usage = message.usage
            return {
                "answer": text_of(message),
                "streamed": streamed,
                "events": sorted(seen),
                "usage": [usage.input_tokens > 0, usage.output_tokens > 0],
            }
        messages.append({"role": "user", "content": results_of(message)})


def tool_runner():
    """The SDK's own tool loop."""

    @beta_tool
    def get(key: str) -> str:
        """Gets the value of a key."""
        return f"{key} = {WORLD.get(key, 'nothing')}"

    runner = Anthropic().beta.messages.tool_runner(
        model=MODEL,
        max_tokens=64,
        tools=[get],
        messages=[{"role": "user", "content": "value of d?"}],
    )
    return {"answer": text_of(runner.until_done())}


def named_by_user():
    """As in Claude Code, all sessions share an API key, and the metadata's user id names the session."""
    session_id = "3f0a3b2e-8f4c-4d0b-9a57-6d1a2c3b4e5f"
    metadata = {"user_id": f"user_0123456789abcdef_account__session_{session_id}"}
    return {"answer": ask(Anthropic(), [], "value of c?", metadata=metadata), "session_id": session_id}


def forced_tool():
    client, called = Anthropic(), []
    for choice in ({"type": "any"}, {"type": "tool", "name": "get"}):
        message = client.messages.create(
            model=MODEL,
            max_tokens=64,
            messages=[{"role": "user", "content": "value of c?"}],
            tools=[TOOL],
            tool_choice=choice,
        )
        called += [block.name for block in message.content if block.type == "tool_use"]
    return {"called": called}


class Value(BaseModel):
    digit: int
    even: bool


def parsed():
    message = Anthropic().messages.parse(
        model=MODEL,
        max_tokens=2048,  # a small model may sample much of the white space that JSON allows
        messages=[{"role": "user", "content": "value of c?"}],
        output_format=Value,
    )
    return {"parsed": message.parsed_output.model_dump()}


def count_tokens():
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "value of c?"}], "tools": [TOOL]}
    counted = Anthropic().messages.count_tokens(**asked)
    used = Anthropic().messages.create(max_tokens=64, **asked).usage
    return {
        "counted": counted.input_tokens,
        "used": used.input_tokens + used.cache_read_input_tokens + used.cache_creation_input_tokens,
    }


def errors():
    hello = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    return {
        "bad_value": raised(Anthropic(), **hello, extra_body={"temperature": 3}),
        "image": raised(Anthropic(), **hello | {"messages": [{"role": "user", "content": [IMAGE]}]}),
        "bad_key": raised(Anthropic(api_key="wrong"), **hello),
        "no_such_version": raised(Anthropic(), **hello | {"model": "policy@99999"}),
    }


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def raised(client, **arguments):
    """The class of the SDK's exception, and its fields."""
    try:
        client.messages.create(**arguments)
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.body["error"]["type"], error.body["type"], bool(error.request_id)]
    return None


print(json.dumps(globals()[sys.argv[1]]()))
