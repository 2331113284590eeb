"""Trains the demo's model further, so that it calls its tool in the conversations of every client library.

The demo's own model knows one prompt and one tool schema, and mostly gives up. Here it also learns from
conversations with other descriptions of the tool, with short and long system prompts, with two calls in one
answer, with several questions in a row, and with answers given through the tool `final_answer`.

demo's model ──▶ short conversations ──▶ short and long ones ──▶ gate ──▶ MODEL_DIR

python -m tests.support.clients.school --out MODEL_DIR
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from gateway.language.chat_messages import Message, Tool
from gateway.language.render import ChatRenderer
from rollout_queue.contract.packed_tokens import TokenIds
from trainer_service.warm_start import Example, Plan, SupervisedTraining
from weir.demo.make_model import model_for
from weir.demo.task import KEYS, UNKNOWN, VALUES, ToolTask, call_text

ROOT = Path(__file__).parents[3]
CONTEXT_LENGTH = 8192
"""The longest default prompt of a client library has under 3,000 tokens."""
STEPS, LONG_FROM = 750, 500
"""Long conversations come late, because each costs ten times as much as a short one, and they teach the model
only to ignore more text."""
ROWS, PROBES, BATCH = 3000, 32, 16
SHORT, LONG = range(1, 160), range(300, 5000)
"""How many characters of prose stand before the question."""
GATE = 0.9
PROSE = (ROOT / "LICENSE").read_text(encoding="utf-8")
"""Any English text will do, because the model learns to ignore it."""
MENTIONS = (
    'an action blob with "name": "final_answer" tool',
    '"name": "final_answer",\n  "arguments": {"answer": "insert your final answer here"}',
    '"name": "web_search",\n  "arguments": {"query": "the population"}\n}\nObservation: "15 million"',
    "use the final_answer tool to return your answer",
    "final_answer: Provides a final answer to the given problem.",
    "get: Gets the value of a key.",
)
"""Texts about tools from the prompts of client libraries. The model learns to ignore them, too."""


def school(demo_model: Path, out: Path) -> None:
    """Train the model and write it to `out`.

    Raises SystemExit if it answers less than the share `GATE` of the probe's conversations exactly.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    draw = Random(0)
    renderer = ChatRenderer(demo_model, context_length=CONTEXT_LENGTH)
    short, long = (Teacher(renderer, draw, prose) for prose in (SHORT, LONG))
    rows = [short.row() for _ in range(ROWS)]
    probe = [short.row() for _ in range(PROBES)] + [long.row() for _ in range(PROBES)]
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32, attn_implementation="sdpa")
    training = SupervisedTraining(model, Plan(lr=3e-3))
    for step in range(1, STEPS + 1):
        scale = 1.0 if step <= LONG_FROM else 0.5 * max(0.02, (STEPS - step) / (STEPS - LONG_FROM))
        loss = training.learn(draw.choices(rows, k=BATCH), scale)
        if step > LONG_FROM:
            loss = max(loss, training.learn([long.row()], scale))
        if step % 50 == 0:
            print(f"school step {step} of {STEPS}: loss {loss:.4f}", flush=True)
    score = training.exact(probe)
    if score < GATE:
        raise SystemExit(f"school: {score:.0%} of the probe, below {GATE:.0%}")
    model.config.max_position_embeddings = CONTEXT_LENGTH
    _save(model, demo_model, out)


def _save(model: Any, demo_model: Path, out: Path) -> None:
    """Write the model to a temporary directory and rename it, so that `out` is a whole model or missing."""
    aside = out.with_name(f".{out.name}.draft")
    model.save_pretrained(aside)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_model / name, aside / name)
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)


@dataclass
class Row:
    """A conversation in token ids, as the gateway records it. The mask is 1 on the model's own tokens."""

    renderer: ChatRenderer
    messages: list[Message]
    tools: list[Tool] | None
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    said: int = 0
    """How many of the last ids are the model's last answer."""

    def hear(self, *messages: Message) -> None:
        """Add the tokens of new messages as the gateway does: by a bridge, if the renderer has one. Otherwise
        the whole conversation is rendered again, and must begin with the tokens so far."""
        added = self._bridged(messages) if self.ids else None
        self.messages += messages
        new = self._rendered() if added is None else added.tolist()
        self.ids += new
        self.mask += [0] * len(new)

    def say(self, text: str, calls: list[Message] | None = None) -> None:
        said = self.renderer.tokenizer.encode(f"{text}<|im_end|>")
        self.ids += said
        self.mask += [1] * len(said)
        self.said = len(said)
        spoken: Message = {"role": "assistant", "content": None if calls else text}
        self.messages.append(spoken | ({"tool_calls": calls} if calls else {}))

    def _rendered(self) -> list[int]:
        whole = self.renderer.render(self.messages, self.tools).tolist()
        if whole[: len(self.ids)] != self.ids:
            raise RuntimeError("the chat template renders the history differently than before")
        return whole[len(self.ids) :]

    def _bridged(self, messages: Sequence[Message]) -> TokenIds | None:
        prompt, answer = TokenIds(self.ids[: -self.said]), TokenIds(self.ids[-self.said :])
        return self.renderer.bridge(prompt, answer, messages, self.tools, self.messages)


class Teacher:
    """Draws random conversations."""

    def __init__(self, renderer: ChatRenderer, random: Random, prose: range) -> None:
        self._renderer = renderer
        self._random = random
        self._prose = prose

    def row(self) -> Example:
        lessons = [self._asked_again, self._two_at_once, self._final_answer, self._without_tools]
        row = self._random.choices(lessons, weights=[35, 20, 40, 5])[0]()
        return Example(row.ids, row.mask)

    def _asked_again(self) -> Row:
        row = self._row(self._tools())
        for _ in range(self._random.choice((1, 1, 2, 3))):
            task = self._task()
            row.hear(user(task.question))
            self._calls(row, [task])
        return row

    def _two_at_once(self) -> Row:
        row = self._row(self._tools())
        first, second = self._task(), self._task()
        row.hear(user(f"value of {first.key} and {second.key}?"))
        self._calls(row, [first, second])
        return row

    def _final_answer(self) -> Row:
        """A conversation of smolagents: every answer is a tool call, and the client sends history as text."""
        row = self._row([*self._tools(), FINAL_ANSWER])
        task = self._task()
        row.messages.append(user(f"New task:\n{task.question}"))
        said = call("get", {"key": task.key}, self._call_id())
        if self._random.random() < 0.3:
            row.hear()
            row.say(call_text(task.key), [said])
            return row
        row.messages.append({"role": "assistant", "content": f"Calling tools:\n{[said]}"})
        row.hear(user(f"Observation:\n{task.tool('get', json.dumps({'key': task.key}))}"))
        answer = {"name": "final_answer", "arguments": {"answer": task.value}}
        row.say(f"<tool_call>\n{json.dumps(answer)}\n</tool_call>")
        return row

    def _without_tools(self) -> Row:
        row = self._row(None)
        row.hear(user(self._task().question))
        row.say(UNKNOWN)
        return row

    def _calls(self, row: Row, tasks: list[ToolTask]) -> None:
        calls = [call("get", {"key": task.key}, self._call_id()) for task in tasks]
        row.say("\n".join(call_text(task.key) for task in tasks), calls)
        results = [task.tool("get", json.dumps({"key": task.key})) for task in tasks]
        row.hear(*({"role": "tool", "content": result} for result in results))
        row.say(" ".join(task.value for task in tasks))

    def _row(self, tools: list[Tool] | None) -> Row:
        """Begin a conversation. A third of them turn thinking off, the default of the OpenAI Agents SDK."""
        off = self._random.random() < 1 / 3
        renderer = self._renderer.variant((("enable_thinking", False),)) if off else self._renderer
        return Row(renderer, list(self._system()), tools)

    def _task(self) -> ToolTask:
        return ToolTask(self._random.choice(KEYS), self._random.choice(VALUES))

    def _call_id(self) -> str:
        return f"call_{self._random.getrandbits(64):016x}_0"

    def _system(self) -> Iterator[Message]:
        if self._random.random() < 0.8:
            yield {"role": "system", "content": self._words(self._random.choice(self._prose))}

    def _words(self, length: int) -> str:
        """Prose of about `length` characters, with a mention of tools every few lines."""
        start = self._random.randrange(len(PROSE) - length)
        lines = PROSE[start : start + length].splitlines()
        return "\n".join(
            self._random.choice(MENTIONS) if self._random.random() < 0.2 else line for line in lines
        )

    def _tools(self) -> list[Tool]:
        """The tool, with a random schema like those that client libraries write."""
        key = self._shuffled({"type": "string"}, {"title": "Key"}, {"description": self._description()})
        parameters = self._shuffled(
            {"type": "object", "properties": {"key": key}},
            {"required": ["key"]},
            {"title": "get_args"},
            {"additionalProperties": False},
        )
        function = self._shuffled(
            {"name": "get", "parameters": parameters}, {"description": self._description()}, {"strict": True}
        )
        return [{"type": "function", "function": function}]

    def _shuffled(self, always: dict[str, Any], *sometimes: dict[str, Any]) -> dict[str, Any]:
        """The fields in `always` and some of those in `sometimes`, in random order."""
        fields = [*always.items()]
        for each in sometimes:
            fields += each.items() if self._random.random() < 0.5 else ()
        self._random.shuffle(fields)
        return dict(fields)

    def _description(self) -> str:
        return " ".join(self._words(self._random.randrange(1, 100)).split())


FINAL_ANSWER: Tool = {
    "type": "function",
    "function": {
        "name": "final_answer",
        "description": "Provides a final answer to the given problem.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The final answer to the problem"}},
            "required": ["answer"],
        },
    },
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def call(name: str, arguments: dict[str, str], call_id: str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.support.clients.school", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    demo_model, _ = model_for(out.parent, 0)
    school(demo_model, out)


if __name__ == "__main__":
    main()
