"""The program of a `smolagents` user: a tool-calling agent over an OpenAI-compatible model."""

import json
import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

WORLD = {"c": "7", "d": "3"}


@tool
def get(key: str) -> str:
    """Gets the value of a key.

    Args:
        key: The key.
    """
    return f"{key} = {WORLD.get(key, 'nothing')}"


def agent(**more):
    model = OpenAIModel(
        model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    return ToolCallingAgent(tools=[get], model=model, max_steps=6, verbosity_level=0, **more)


def run():
    playing = agent()
    answer = playing.run("value of c?")
    return {"answer": answer, "calls": calls_of(playing)}


def streamed():
    playing = agent(stream_outputs=True)
    answer = playing.run("value of c?")
    return {"answer": answer, "calls": calls_of(playing)}


def calls_of(playing):
    return [call.name for step in playing.memory.steps for call in getattr(step, "tool_calls", None) or []]


said = globals()[sys.argv[1]]()
print()  # the output of a streamed run may not end with a newline
print(json.dumps(said))
