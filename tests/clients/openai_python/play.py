"""The program of an `openai` user. The SDK takes base URL and key from the environment."""

import asyncio
import json
import sys

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

WORLD = {"a": "1", "b": "8", "c": "7", "d": "3", "e": "4", "f": "9", "g": "5", "h": "0"}
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


def ask(client, messages, question):
    """Ask one question, and make as many calls as the model's tool calls need."""
    messages.append({"role": "user", "content": question})
    while True:
        completion = client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=[TOOL])
        message = completion.choices[0].message
        messages += [message, *tool_messages(message)]
        if not message.tool_calls:
            return message.content


def tool_loop():
    return {"answer": ask(OpenAI(), [], "value of c?")}


def parallel_calls():
    messages = []
    answer = ask(OpenAI(), messages, "value of c and d?")
    return {"answer": answer, "calls": [call.function.arguments for call in messages[1].tool_calls]}


def conversation():
    client = OpenAI()
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    return {"answers": [ask(client, messages, f"value of {key}?") for key in "cdc"]}


def stream():
    """The plain iterator: the agent joins the deltas itself, as many agents do."""
    client = OpenAI()
    messages = [{"role": "user", "content": "value of c?"}]
    arguments, name, call_id, finish, usage = "", None, None, None, None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model="gpt-4o-mini", messages=messages, tools=[TOOL], stream=True, stream_options=options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                name, call_id = call.function.name or name, call.id or call_id
                arguments += call.function.arguments or ""
    called = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
    messages.append({"role": "tool", "tool_call_id": call_id, "content": get(**json.loads(arguments))})
    answer = ""
    for chunk in client.chat.completions.create(
        model="gpt-4o-mini", messages=messages, tools=[TOOL], stream=True
    ):
        answer += chunk.choices[0].delta.content or ""
    return {"answer": answer, "finish": finish, "completion_tokens": usage.completion_tokens}


def stream_helper():
    client = OpenAI()
    messages, seen = [{"role": "user", "content": "value of c and d?"}], set()
    while True:
        with client.chat.completions.stream(model="gpt-4o-mini", messages=messages, tools=[TOOL]) as events:
            seen |= {event.type for event in events}
            message = events.get_final_completion().choices[0].message
        messages += [message, *tool_messages(message)]
        if not message.tool_calls:
            return {"answer": message.content, "events": sorted(seen)}


def many_at_once():
    """Eight agents share one key, and no agent names a session."""

    async def one(client, key):
        messages = [{"role": "user", "content": f"value of {key}?"}]
        while True:
            completion = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            message = completion.choices[0].message
            messages += [message, *tool_messages(message)]
            if not message.tool_calls:
                return message.content

    async def all_of_them():
        async with AsyncOpenAI() as client:
            return await asyncio.gather(*(one(client, key) for key in WORLD))

    return {"answers": asyncio.run(all_of_them())}


def samples():
    completion = OpenAI().chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "value of c?"}],
        tools=[TOOL],
        n=3,
        logprobs=True,
        top_logprobs=2,
    )
    return {
        "finishes": [choice.finish_reason for choice in completion.choices],
        "logprobs": [len(choice.logprobs.content) for choice in completion.choices],
        "completion_tokens": completion.usage.completion_tokens,
    }


def forced_tool():
    client = OpenAI()
    choices = ["required", {"type": "function", "function": {"name": "get"}}]
    called = []
    for tool_choice in choices:
        completion = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "value of c?"}],
            tools=[TOOL],
            tool_choice=tool_choice,
        )
        called += [call.function.name for call in completion.choices[0].message.tool_calls]
    return {"called": called}


class Value(BaseModel):
    digit: int
    even: bool


def parsed():
    completion = OpenAI().chat.completions.parse(
        model="m",
        messages=[{"role": "user", "content": "value of c?"}],
        response_format=Value,
    )
    return {"parsed": completion.choices[0].message.parsed.model_dump()}


def completions():
    completion = OpenAI().completions.create(model="m", prompt="value of c?", max_tokens=8)
    chunks = OpenAI().completions.create(model="m", prompt="value of c?", max_tokens=8, stream=True)
    return {
        "completion_tokens": completion.usage.completion_tokens,
        "finish": completion.choices[0].finish_reason,
        "streamed_finish": [chunk.choices[0].finish_reason for chunk in chunks][-1],
    }


def responses():
    """The Responses API, used directly: the server keeps the history."""
    client = OpenAI()
    tool = {"type": "function", **TOOL["function"]}
    response = client.responses.create(model="m", input="value of c?", tools=[tool])
    (call,) = [item for item in response.output if item.type == "function_call"]
    output = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": get(**json.loads(call.arguments)),
    }
    answer = client.responses.create(
        model="m", input=[output], tools=[tool], previous_response_id=response.id
    )
    return {"answer": answer.output_text}


def models():
    return {"models": [model.id for model in OpenAI().models.list()]}


def errors():
    hello = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    return {
        "bad_value": raised(OpenAI(), **hello | {"temperature": 3}),
        "no_messages": raised(OpenAI(), model="m", messages=[]),
        "too_long": raised(OpenAI(), **hello | {"messages": [{"role": "user", "content": "a " * 9000}]}),
        "image": raised(OpenAI(), **hello | {"messages": [{"role": "user", "content": [IMAGE]}]}),
        "bad_key": raised(OpenAI(api_key="wrong"), **hello),
        "no_such_version": raised(OpenAI(), **hello | {"model": "policy@99999"}),
    }


def finished():
    return {"error": raised(OpenAI(), model="m", messages=[{"role": "user", "content": "hello"}])}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def raised(client, **arguments):
    """The class of the SDK's exception, and its fields."""
    try:
        client.chat.completions.create(**arguments)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.type, error.code, bool(error.request_id)]
    return None


print(json.dumps(globals()[sys.argv[1]]()))
