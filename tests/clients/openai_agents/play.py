"""The program of an `openai-agents` user, with the default model class, which uses the Responses API."""

import asyncio
import json
import sys

import openai
from agents import Agent, ModelSettings, Runner, SQLiteSession, function_tool
from pydantic import BaseModel

WORLD = {"c": "7", "d": "3"}


@function_tool
def get(key: str) -> str:
    """Gets the value of a key."""
    return f"{key} = {WORLD.get(key, 'nothing')}"


AGENT = Agent(name="Assistant", instructions="You are a helpful assistant.", tools=[get])


def kinds(result):
    return [item.type for item in result.new_items]


def tool_loop():
    result = Runner.run_sync(AGENT, "value of c?")
    usage = result.context_wrapper.usage
    return {"answer": result.final_output, "items": kinds(result), "requests": usage.requests}


def parallel_calls():
    result = Runner.run_sync(AGENT, "value of c and d?")
    return {"answer": result.final_output, "items": kinds(result)}


def streamed():
    async def run():
        result = Runner.run_streamed(AGENT, "value of c?")
        events, text = set(), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                events.add(event.data.type)
                text += event.data.delta if event.data.type == "response.output_text.delta" else ""
        return {"answer": result.final_output, "streamed": text, "events": sorted(events)}

    return asyncio.run(run())


def memory():
    """The SDK keeps the history and sends all of it."""
    session = SQLiteSession("memory")
    answers = [Runner.run_sync(AGENT, f"value of {key}?", session=session).final_output for key in "cd"]
    return {"answers": answers}


def previous_response():
    """The server keeps the history."""
    first = Runner.run_sync(AGENT, "value of c?", auto_previous_response_id=True)
    second = Runner.run_sync(AGENT, "value of d?", previous_response_id=first.last_response_id)
    return {"answers": [first.final_output, second.final_output]}


def forced_tool():
    agent = AGENT.clone(model_settings=ModelSettings(tool_choice="required"))
    result = Runner.run_sync(agent, "value of c?")
    return {"answer": result.final_output, "items": kinds(result)}


class Value(BaseModel):
    digit: int
    even: bool


def parsed():
    agent = Agent(name="Assistant", instructions="You are a helpful assistant.", output_type=Value)
    return {"parsed": Runner.run_sync(agent, "value of c?").final_output.model_dump()}


def handoff():
    """A second agent of the same run has another system prompt, so that its turns are another branch."""
    helper = Agent(name="Helper", handoff_description="Knows values.", tools=[get])
    triage = Agent(
        name="Triage",
        instructions="Hand off.",
        handoffs=[helper],
        model_settings=ModelSettings(tool_choice="required"),
    )
    result = Runner.run_sync(triage, "value of c?")
    return {"last_agent": result.last_agent.name, "items": kinds(result)}


def errors():
    too_hot = AGENT.clone(model_settings=ModelSettings(temperature=3))
    pinned = AGENT.clone(model="policy@99999")
    return {"bad_value": raised(too_hot), "no_such_version": raised(pinned)}


def raised(agent):
    try:
        Runner.run_sync(agent, "hello")
    except openai.APIStatusError as error:
        return [type(error).__name__, error.type, error.code]
    return None


print(json.dumps(globals()[sys.argv[1]]()))
