"""The program of a `pydantic-ai` user. The library takes base URL and key from the environment."""

import asyncio
import json
import os
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic_ai import Agent

MODEL = os.environ["AGENT_MODEL"]
QUESTIONS = "Save the word weir in word.txt.", "Read it back."
agent = Agent(MODEL, instructions="You are a helpful assistant.")


@agent.tool_plain
def write(path: str, text: str) -> str:
    """Writes a file."""
    Path(path).write_text(text)
    return f"wrote {path}"


@agent.tool_plain
def read(path: str) -> str:
    """Reads a file."""
    return f"{path} has {Path(path).read_text()}"


def conversation():
    answers, history = [], None
    for question in QUESTIONS:
        result = agent.run_sync(question, message_history=history)
        answers.append(result.output)
        history = result.all_messages()
    return {"answers": answers}


def kept_history():
    """The history goes through JSON between two questions, as in an application that stores conversations."""
    from pydantic_ai import ModelMessagesTypeAdapter

    answers, history = [], None
    for question in QUESTIONS:
        result = agent.run_sync(question, message_history=history)
        answers.append(result.output)
        history = ModelMessagesTypeAdapter.validate_json(result.all_messages_json())
    return {"answers": answers}


def streamed():
    async def run():
        answers, pieces, history = [], 0, None
        for question in QUESTIONS:
            async with agent.run_stream(question, message_history=history) as result:
                text = ""
                async for piece in result.stream_text(delta=True, debounce_by=None):
                    pieces += 1
                    text += piece
            answers.append(text)
            history = result.all_messages()
        return {"answers": answers, "pieces": pieces}

    return asyncio.run(run())


class Word(BaseModel):
    word: str
    letters: int


def typed():
    """Ask for structured output in the library's default way: the model calls a tool of the library."""
    result = agent.run_sync(QUESTIONS[0], output_type=Word)
    return {"parsed": result.output.model_dump()}


print(json.dumps(globals()[sys.argv[1]]()))
