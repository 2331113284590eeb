"""The program of an `inspect-ai` user: it evaluates a ReAct agent, which has one tool, on one task."""

import json
import os
import sys
from pathlib import Path

import inspect_ai
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import bash, tool

QUESTION = "Save the word weir in word.txt, then submit it."


@tool
def write():
    async def execute(path: str, text: str) -> str:
        """Writes a file.

        Args:
            path: The file's path.
            text: What to write.
        """
        Path(path).write_text(text)  # noqa: ASYNC240 - one small file
        return f"wrote {path}"

    return execute


def evaluated(tools, model, **more):
    task = Task(
        dataset=[Sample(input=QUESTION, target="weir")],
        solver=react(prompt="You are a helpful assistant.", tools=tools),
        scorer=includes(),
        **more,
    )
    (log,) = inspect_ai.eval(task, model=model, display="none", log_dir="logs")
    (sample,) = log.samples
    return {
        "status": log.status,
        "score": sample.scores["includes"].value,
        "output": sample.output.completion,
        "roles": [message.role for message in sample.messages],
    }


def solved():
    return evaluated([write()], os.environ["AGENT_MODEL"])


def in_a_sandbox():
    return evaluated([bash(timeout=60)], os.environ["AGENT_MODEL"], sandbox="local")


print(json.dumps(globals()[sys.argv[1]]()))
