"""The program of a `litellm` user. The prefix `openai/` of the model's name selects the protocol."""

import asyncio
import json
import os
import sys

import litellm

WORLD = {"c": "7", "d": "3"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Gets the value of a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def get(key):
    return f"{key} = {WORLD.get(key, 'nothing')}"


def tool_messages(message):
    for call in message.tool_calls or []:
        result = get(**json.loads(call.function.arguments))
        yield {"role": "tool", "tool_call_id": call.id, "content": result}


def ask(messages, **more):
    while True:
        reply = litellm.completion(model="openai/policy", messages=messages, tools=[TOOL], **more)
        message = reply.choices[0].message
        messages += [message, *tool_messages(message)]
        if not message.tool_calls:
            return message.content


def tool_loop():
    return {"answer": ask([{"role": "user", "content": "value of c?"}])}


def parallel_calls():
    return {"answer": ask([{"role": "user", "content": "value of c and d?"}])}


def named_by_header():
    """One key for all sessions, and a header that names the session."""
    headers = {"x-session-id": os.environ["SESSION_ID"]}
    return {"answer": ask([{"role": "user", "content": "value of c?"}], extra_headers=headers)}


def stream():
    messages = [{"role": "user", "content": "value of c?"}]
    while True:
        chunks = list(litellm.completion(model="openai/policy", messages=messages, tools=[TOOL], stream=True))
        whole = litellm.stream_chunk_builder(chunks, messages=messages)
        message = whole.choices[0].message
        messages += [message.model_dump(), *tool_messages(message)]
        if not message.tool_calls:
            return {"answer": message.content, "finish": whole.choices[0].finish_reason}


def asynchronous():
    async def run():
        reply = await litellm.acompletion(
            model="openai/policy", messages=[{"role": "user", "content": "value of c?"}], tools=[TOOL]
        )
        return {"finish": reply.choices[0].finish_reason, "tokens": reply.usage.completion_tokens}

    return asyncio.run(run())


def anthropic_protocol():
    """litellm's Anthropic provider, which calls /v1/messages."""
    messages = [{"role": "user", "content": "value of c?"}]
    while True:
        reply = litellm.completion(
            model="anthropic/policy",
            messages=messages,
            tools=[TOOL],
            max_tokens=64,
            api_base=os.environ["ANTHROPIC_BASE_URL"],
            api_key=os.environ["ANTHROPIC_API_KEY"],
        )
        message = reply.choices[0].message
        messages += [message, *tool_messages(message)]
        if not message.tool_calls:
            return {"answer": message.content}


def errors():
    hello = {"model": "openai/policy", "messages": [{"role": "user", "content": "hello"}]}
    return {
        "bad_value": raised(**hello | {"temperature": 3}),
        "bad_key": raised(**hello, api_key="wrong"),
        "no_such_version": raised(**hello | {"model": "openai/policy@99999"}),
    }


def raised(**arguments):
    try:
        litellm.completion(**arguments)
    except litellm.exceptions.APIError as error:
        return [type(error).__name__, error.status_code]
    except litellm.exceptions.BadRequestError as error:
        return [type(error).__name__, error.status_code]
    except Exception as error:
        return [type(error).__name__, getattr(error, "status_code", None)]
    return None


print(json.dumps(globals()[sys.argv[1]]()))
