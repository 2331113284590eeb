"""An engine that plays a model of the family qwen3: it answers by what is new in the prompt."""

import json
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tests.support.gateway.fake_engine import FakeEngine, logprob_of

FAMILY = "qwen3"
TOOLS = "# Tools\n\nYou may call one or more functions"
"""How the template begins the list of the tools."""
READING_PACE_S = 0.05
"""A pace at which the gateway passes the tokens of a stream on in several events."""
BEGIN, SPEAKS = "<|im_start|>", "assistant\n"


def tool_call(name: str, **arguments: Any) -> str:
    """A tool call as a Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Exchange:
    """One prompt, and what the engine sampled for it."""

    prompt_ids: list[int]
    output_ids: list[int]

    @property
    def logprobs(self) -> list[float]:
        return [logprob_of(index) for index in range(len(self.output_ids))]


@dataclass(eq=False)
class ActingEngine(FakeEngine):
    """Gives the first of `answers` whose cue stands in the new part of the prompt."""

    answers: dict[str, str] = field(default_factory=dict)
    """By cue: a text in a question or in a tool's result."""
    side_answer: str = "Words and files"
    """The answer to a call without tools, such as a harness's request for a title."""
    exchanges: list[Exchange] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    """The new parts of prompts that contain no cue; calls without tools are left out."""

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        answer = self._answer(self.tokenizer.decode(body["input_ids"], skip_special_tokens=False))
        self.script.append(answer)
        ids = self.tokenizer.encode(answer + "<|im_end|>").ids
        self.exchanges.append(Exchange(body["input_ids"], ids))
        return await super().generate(request)

    def _answer(self, prompt: str) -> str:
        if TOOLS not in prompt:
            return self.side_answer
        said = new_in(prompt)
        for cue, answer in self.answers.items():
            if cue in said:
                return answer
        self.unexpected.append(said)
        return "Nothing to say."


def new_in(prompt: str) -> str:
    """The messages after the assistant's last one."""
    *before, _ = prompt.split(BEGIN)
    spoken = [index for index, message in enumerate(before) if message.startswith(SPEAKS)]
    return BEGIN.join(before[spoken[-1] + 1 if spoken else 0 :])
