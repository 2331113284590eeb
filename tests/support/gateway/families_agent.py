"""An agent whose calls go straight to `locate`, without HTTP, and the ids that a model would sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gateway.generations.conversation import Prompt, locate, reply_message
from gateway.generations.digests import extend
from gateway.language.chat_messages import Message, Tool
from gateway.language.families import Thinking
from gateway.language.parsed_answer import ParsedAnswer
from gateway.language.render import ChatRenderer
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Finish, SessionSpec, Span, Turn
from tests.support.gateway.families_models import make_model

TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Looks a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
MARK = "marked-by-nobody"
RendererOf = Callable[..., ChatRenderer]
"""Of a family, and of the choice of the thoughts that prompts keep."""


@cache
def renderer_of(directory: Path, family: str, thinking: Thinking = "template") -> ChatRenderer:
    return ChatRenderer(make_model(directory / family, family), family, thinking)


def call(arguments: Any = '{"key": "a", "n": 1}', call_id: Any = "call_1", name: Any = "get") -> Message:
    made: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call_id is None else made | {"id": call_id}


def told(content: Any = None, *calls: Message, **more: Any) -> Message:
    """A message of the assistant."""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def result(text: Any, call_id: Any = "call_1") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def sampled(renderer: ChatRenderer, prompt_ids: TokenIds, said: Message) -> list[int]:
    """The ids that a model of this family would sample for the message `said`, with its stop token last.

    They are cut from the conversation that the template renders. If this does not begin with the prompt, the
    prompt has opened a thought, and the ids close the thought first.
    """
    tools = [TOOL]
    inner, normalizer = renderer.template, renderer.normalizer
    before = normalizer.conversation([user(MARK)], tools)
    asked = inner.render_ids(before, tools=tools, add_generation_prompt=True)
    for message in (said, {key: value for key, value in said.items() if key != "reasoning_content"}):
        after = inner.render_ids([*before, *normalizer.continuation([message], [user(MARK)])], tools=tools)
        shared = next((i for i, (a, b) in enumerate(zip(asked, after, strict=False)) if a != b), len(asked))
        if shared == len(asked):
            ids = after[shared:]
            break
    else:
        ids = renderer.tokenizer.encode("so\n</think>\n\n") + after[shared:]
    stop = next((i for i, token_id in enumerate(ids) if token_id in renderer.stop_ids), len(ids))
    return [*ids[:stop], ids[stop] if stop < len(ids) else renderer.stop_ids[0]]


@dataclass
class Agent:
    """The agent of one session, which keeps all messages."""

    renderer: ChatRenderer
    tools: list[Tool] | None = field(default_factory=lambda: [TOOL])
    messages: list[Message] = field(default_factory=list)
    head: SessionHead = field(
        default_factory=lambda: SessionHead(spec=SessionSpec(session_id="s", created_at=0))
    )

    def ask(self, *messages: Message) -> Prompt:
        """Add messages to the conversation, and locate the prompt of the call."""
        self.messages += messages
        return self.placed(self.messages)

    def placed(self, messages: Sequence[Message], tools: Any = "the same") -> Prompt:
        prompt = locate(self.renderer, self.head, messages, self.tools if tools == "the same" else tools)
        check(self.head, prompt)
        return prompt

    def answer(
        self, prompt: Prompt, ids: Sequence[int], finish: Finish = "stop"
    ) -> tuple[Turn, ParsedAnswer]:
        """Record sampled ids as a turn. Returns the turn, and the answer that the agent reads."""
        turn_id = f"turn{len(self.head.turns)}"
        read = self.renderer.parse(ids, self.tools, turn_id, prompt_ids=prompt.prompt_ids)
        reply = "" if finish == "abort" else extend(prompt.digest, reply_message(read)).hex()
        turn = Turn(
            turn_id=turn_id,
            session_id="s",
            parent_id=prompt.parent.turn_id if prompt.parent else None,
            relation=prompt.relation,
            reason=prompt.reason,
            context_ids=prompt.context_ids,
            output_ids=TokenIds(ids),
            logprobs=Logprobs([-1.0] * len(ids)),
            versions=(Span(0, 0, len(ids)),),
            finish=finish,
            started_at=0,
            finished_at=0,
            prompt_digest=prompt.digest.hex(),
            reply_digest=reply,
        )
        self.head = SessionHead(spec=self.head.spec, turns=(*self.head.turns, turn))
        return turn, read

    def hear(self, prompt: Prompt, said: Message) -> Turn:
        """The model samples `said` in its family's format, and the agent keeps the message that it reads."""
        turn, read = self.answer(prompt, sampled(self.renderer, prompt.prompt_ids, said))
        self.messages.append(as_sent_back(read))
        return turn


def as_sent_back(read: ParsedAnswer, reasoning: bool = False) -> Message:
    """An answer as OpenAI's clients return it in the next call."""
    calls = [call(made.arguments, made.call_id, made.name) for made in read.tool_calls]
    message = told(read.content or None, *calls)
    return message | {"reasoning_content": read.reasoning} if reasoning and read.reasoning else message


def check(head: SessionHead, prompt: Prompt) -> None:
    """Check the conditions that every prompt of every conversation meets."""
    before = TokenIds()
    if prompt.parent is not None:
        context_ids, output_ids = head.branch_ids(prompt.parent)
        before = TokenIds(context_ids + output_ids)
    assert prompt.prompt_ids == TokenIds(before + prompt.context_ids)
    assert len(prompt.context_ids) > 0
    assert isinstance(prompt.prompt_ids, TokenIds)
    assert isinstance(prompt.context_ids, TokenIds)
    assert (prompt.reason is None) == (prompt.relation in ("root", "extends"))
    assert prompt.relation != "root" or prompt.parent is None
    assert prompt.relation != "extends" or prompt.parent is not None
