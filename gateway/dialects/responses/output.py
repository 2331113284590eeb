"""The output of a response: the fields it begins with, the items of an answer, and their state and usage."""

from collections.abc import Sequence

from msgspec import UNSET, Raw

from gateway.dialects.base import RecordedAnswer
from gateway.dialects.responses.wire import (
    PREFIX,
    CachedTokens,
    FunctionCallItem,
    Incomplete,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ReasoningTokens,
    ResponseHead,
    ResponsesRequest,
    ResponseState,
    ResponseUsage,
)
from gateway.generations.generation import Generation
from gateway.language.parsed_answer import ToolCall


def output_of(recorded: RecordedAnswer, logprobs: Sequence[Raw] = ()) -> list[OutputItem]:
    """The items of an answer. An empty answer becomes an empty message, so the client can send it back."""
    generation, turn, answer = recorded
    cut = turn.finish == "length"
    output: list[OutputItem] = []
    if reasoning := (answer.reasoning or "").lstrip():  # streams leave leading blanks out as well
        done = not cut or answer.content or answer.tool_calls
        output.append(reasoning_item(generation, reasoning, "completed" if done else "incomplete"))
    if answer.content or not answer.tool_calls:
        status = "incomplete" if cut else "completed"
        output.append(message_item(generation, answer.content, status, logprobs))
    return output + [call_item(generation, index, call) for index, call in enumerate(answer.tool_calls)]


def final_state(recorded: RecordedAnswer, output: Sequence[OutputItem], with_ids: bool) -> ResponseState:
    """The state of a response whose answer is recorded; `with_ids` adds the token ids."""
    generation, turn, _ = recorded
    cut = turn.finish == "length"
    return ResponseState(
        status="incomplete" if cut else "completed",
        completed_at=None if cut else int(turn.finished_at),
        incomplete_details=Incomplete() if cut else None,
        output=output,
        usage=_usage(generation),
        prompt_token_ids=generation.prompt.prompt_ids.tolist() if with_ids else UNSET,
        token_ids=generation.ids if with_ids else UNSET,
    )


def reasoning_item(generation: Generation, text: str | None, status: str) -> ReasoningItem:
    """The item of the model's reasoning. `text` is None for the item at its beginning."""
    content = () if text is None else (ReasoningText(text),)
    return ReasoningItem(id="rs_" + _name(generation), content=content, status=status)


def message_item(
    generation: Generation, text: str | None, status: str, logprobs: Sequence[Raw] = ()
) -> MessageItem:
    """The item of the model's answer. `text` is None for the item at its beginning."""
    content = () if text is None else (OutputText(text, logprobs=logprobs),)
    return MessageItem(id="msg_" + _name(generation), content=content, status=status)


def call_item(generation: Generation, index: int, call: ToolCall) -> FunctionCallItem:
    """The item of the model's tool call number `index`."""
    return FunctionCallItem(
        id=f"fc_{_name(generation)}_{index}",
        call_id=call.call_id,
        name=call.name,
        arguments=call.arguments,
    )


def head_of(request: ResponsesRequest, model: str, generation: Generation) -> ResponseHead:
    """The fields of the response that its first event already contains."""
    used = generation.sampling.used
    text = {name: value for name, value in (request.text or {}).items() if value is not None}
    return ResponseHead(
        id=generation.completion_id,
        created_at=int(generation.started_at),
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning,
        safety_identifier=request.safety_identifier,
        user=request.user,
        background=bool(request.background),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        store=request.store is not False,
        temperature=used["temperature"],
        text={"format": {"type": "text"}, **text},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=used["top_p"],
    )


def _name(generation: Generation) -> str:
    return generation.completion_id.removeprefix(PREFIX)


def _usage(generation: Generation) -> ResponseUsage:
    prompt, completion = len(generation.prompt.prompt_ids), len(generation.ids)
    return ResponseUsage(
        input_tokens=prompt,
        input_tokens_details=CachedTokens(generation.cached_tokens),
        output_tokens=completion,
        output_tokens_details=ReasoningTokens(generation.reasoning_tokens),
        total_tokens=prompt + completion,
    )
