"""Begins generations, and samples them on the fleet.

call ──begin──▶ parent, prompt, sampling ──sample──▶ chunks …

`decide` chooses the sampling parameters of an answer; both those requested and those used are recorded.

The engine's logprobs are of softmax(logits / temperature), before top-p and top-k. They are exact for the
sampled distribution only if nothing but a temperature above 0 changes it. So mode `exact` takes this
temperature and `max_tokens` from a call, and ignores its other parameters; `enforce` ignores the temperature,
too. Both ignore a `seed`: a harness that always sends the same would have every session of a group sample the
same answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from gateway.cancellation import cancel_and_wait
from gateway.counters import CallFigures, PromptTime
from gateway.errors import EngineFault, GatewayError, InvalidRequest, NoServer
from gateway.fleet.event_stream import OutputChunk
from gateway.fleet.failover import Sampler, Waits
from gateway.fleet.generate_request import PromptImage, SampleRequest, SamplingParameters
from gateway.generations.conversation import Prompt, locate, locate_raw
from gateway.generations.generation import Call, ClientCall, Generation, Pinned
from gateway.generations.recorder import Recorder, asked_attributes, operation_of, sampled_attributes
from gateway.generations.side_calls import side_call_of
from gateway.language.deltas import beginning
from gateway.language.image_pads import collapsed
from gateway.language.parsed_answer import UNREADABLE
from gateway.language.render import ChatRenderer
from gateway.language.thinking import effort_of
from gateway.policies.canary_watch import CanaryWatch
from gateway.settings import GatewaySettings
from rollout_queue import clock
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.ids import new_id
from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.contract.records import (
    WITHOUT_EFFECT,
    PastThoughts,
    ReasoningEffort,
    Sampling,
    SamplingMode,
    SamplingPolicy,
    inexact,
    is_greedy,
)
from rollout_queue.http.json_routes import FairTurns
from rollout_queue.service_log import of_turn
from rollout_queue.tracing import span

NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values without effect. They are sent where no other value applies, so that no engine's default does."""
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PENALTIES = ("frequency_penalty", "presence_penalty", "logit_bias", "min_tokens")
"""Parameters that change logits. `min_tokens` forbids the tokens that end an answer, until it is so long."""
COMPARED = frozenset((*DEFAULTED, *PENALTIES))
"""Parameters of a call that may be used with another value, or not at all."""
RENAMED = frozenset({"max_tokens", "min_tokens", "seed", "constraint", "thinking", "why"})
"""Parameters that have another name at the engine, or change the prompt and not the sampling, and words."""
REASONS: Mapping[SamplingMode, str] = {
    "exact": "would make the logprobs inexact of a trained answer (sampling.mode exact)",
    "enforce": "the session's apply to a trained answer (sampling.mode enforce)",
    "default": "no penalty applies to a trained answer (sampling.mode default)",
    "allow": "the answer has no more tokens",
}
"""Why a parameter of a call is not used, or only in part."""


def decide(policy: SamplingPolicy, call: Call, room: int, train: bool, index: int = 0) -> Sampling:
    """The sampling of choice `index` of one call; `room` is the number of tokens left in the context.

    If `train` is false, the answer is an evaluation, and the caller's parameters apply.
    """
    asked = call.asked
    mode = policy.named_mode if train else "allow"
    used: dict[str, Any] = {"temperature": policy.temperature, "top_p": policy.top_p, **NEUTRAL}
    if mode in ("default", "allow"):
        used |= {name: asked[name] for name in DEFAULTED if name in asked}
    elif mode == "exact" and "temperature" in asked and not is_greedy(asked["temperature"]):
        used["temperature"] = asked["temperature"]
    if mode == "allow":
        used |= {name: asked[name] for name in PENALTIES if asked.get(name)}
    limits = [asked.get("max_tokens"), policy.max_tokens, room]
    used["max_tokens"] = min(limit for limit in limits if limit is not None)
    if "min_tokens" in used:
        used["min_tokens"] = min(used["min_tokens"], used["max_tokens"])
    if call.ignore_eos:
        used["ignore_eos"] = True
    if call.structural_tag is not None:
        used["constraint"] = asked["constraint"]
    if call.thinking:
        used["thinking"] = dict(call.thinking)
    if "seed" in asked and mode in ("default", "allow"):
        used["seed"] = asked["seed"] + index  # with equal seeds, all choices would be equal
    if why := "; ".join(_differences(policy, mode, asked, used)):
        used["why"] = why
    return Sampling(asked=dict(asked), used=used | _lawful(used))


def _lawful(used: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the engine takes, in place of those that only other servers know."""
    made: dict[str, Any] = {}
    if used["top_k"] == 0:  # all, for vLLM
        made["top_k"] = -1
    if used["top_p"] == 0:  # the most likely token only
        made |= {"top_p": 1.0, "top_k": 1}
    if is_greedy(used["temperature"]):
        made["temperature"] = 0.0
    return made


def _differences(
    policy: SamplingPolicy, mode: SamplingMode, asked: Mapping[str, Any], used: Mapping[str, Any]
) -> Iterator[str]:
    """What the call asked for and did not get, and why."""
    unused = [
        name if name == "logit_bias" else f"{name} {asked[name]:g}"
        for name in asked
        if name in COMPARED and used.get(name, WITHOUT_EFFECT.get(name)) != asked[name]
    ]
    if unused:
        yield f"{', '.join(unused)}: {REASONS[mode]}"
    if "seed" in asked and "seed" not in used:
        yield "seed: a group would sample one answer"
    if left_out := asked.get("constraint_left_out"):
        yield f"{', '.join(left_out)}: the engine would take too long to compile them into its grammar"
    if (most := asked.get("max_tokens", 0)) > (limit := used["max_tokens"]):
        of_session = limit == policy.max_tokens
        yield f"max_tokens {most}: the {'session allows' if of_session else 'context has room for'} {limit}"


def engine_parameters(
    sampling: Sampling, stop_ids: list[int], call: Call, stream_interval: int
) -> SamplingParameters:
    """The parameters under the engine's names."""
    same_name = {name: value for name, value in sampling.used.items() if name not in RENAMED}
    return SamplingParameters(
        **same_name,
        max_new_tokens=sampling.used["max_tokens"],
        # With `ignore_eos`, SGLang ends an answer at no stop token.
        stop_token_ids=[] if call.ignore_eos else [*dict.fromkeys((*stop_ids, *call.stop_ids))],
        min_new_tokens=sampling.used.get("min_tokens", UNSET),
        sampling_seed=sampling.used.get("seed", UNSET),
        stop=list(call.stop) or UNSET,
        structural_tag=UNSET if call.structural_tag is None else call.structural_tag,
        stream_interval=stream_interval,
    )


S = TypeVar("S")
T = TypeVar("T")
Appended = Callable[[], Waits | None]
"""Is called once a chunk is appended to a generation. Returns what is awaited before more is read."""
ENCODERS = 2
"""How many long prompts are rendered at the same time."""
WHOLE_ANSWER_INTERVAL = 64
"""Tokens per engine event for a client that waits for the whole answer."""


async def for_each(work: Callable[[S], Awaitable[T]], choices: Sequence[S]) -> list[T]:
    """Run `work` for all choices concurrently. The first failure cancels the others, and is raised."""
    if len(choices) == 1:
        return [await work(choices[0])]
    tasks = [asyncio.ensure_future(work(choice)) for choice in choices]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_and_wait(tasks)


class Generator:
    """Makes the answers to calls, for every dialect."""

    def __init__(
        self,
        settings: GatewaySettings,
        renderer: ChatRenderer,
        sampler: Sampler,
        recorder: Recorder,
        canary: CanaryWatch,
        max_row_tokens: Callable[[], int | None],
    ) -> None:
        """`max_row_tokens` gives the trainer's bound of a row, None without one."""
        self._renderer = renderer
        self._sampler = sampler
        self._recorder = recorder
        self._canary = canary
        self._max_row_tokens = max_row_tokens
        self._template_ids_are_valid = renderer.tokenizer.vocabulary_size <= renderer.config.vocab_size
        self._train_constrained = settings.train_constrained
        self._train_inexact = settings.train_inexact
        self._router_replay = settings.router_replay
        self._reasoning_effort = settings.reasoning_effort
        self._context_length = renderer.context_length
        self._model_name = settings.model_name
        self._encoders, self._turns = ThreadPoolExecutor(ENCODERS, "encoder"), FairTurns(ENCODERS)

    async def begin(
        self,
        head: SessionHead,
        calls: Sequence[Call],
        n: int,
        pinned: Pinned,
        prefix: str,
        heavy: bool,
        client: ClientCall,
    ) -> list[Generation]:
        """Locate each call's prompt and decide its sampling. Returns `n` generations for each call.

        `prefix` begins the completion's id. Prompts of `heavy` (large) requests are rendered in a thread.
        Raises InvalidRequest for a prompt that cannot be rendered, or that does not fit into the context.
        """
        completion_id = f"{prefix}{new_id()}"
        generations: list[Generation] = []
        trial = await self._canary.trial(head) if pinned.version is None else None
        for asked in calls:
            call = self._settled(asked, head.spec.reasoning_effort, head.spec.thinking)
            work = partial(self._locate, head, call)
            prompt = await self._rendered(work, heavy, client.figures, head.spec.owner)
            room = self._context_length - len(prompt.prompt_ids)
            side_call = side_call_of(call.messages, call.tools, call.asked.get("max_tokens"))
            train = head.spec.train and (self._train_constrained or call.structural_tag is None)
            train = train and (head.spec.train_side_calls or side_call is None)
            as_policy = head.spec.train and pinned.version is None
            for index in range(len(generations), len(generations) + n):
                sampling = decide(head.spec.sampling, call, room, as_policy, index)
                generations.append(
                    Generation(
                        call=call,
                        head=head,
                        prompt=prompt,
                        sampling=sampling,
                        completion_id=completion_id,
                        client=client,
                        index=index,
                        train=train and (self._train_inexact or not inexact(sampling.used)),
                        side_call=side_call,
                        pinned=pinned,
                        trial=trial,
                        max_row_tokens=self._max_row_tokens() if train else None,
                    )
                )
        return generations

    def _settled(self, call: Call, effort: ReasoningEffort | None, thinking: PastThoughts | None) -> Call:
        """The call with the effort of its session, unless it asks for one, and with the session's retention.

        Raises InvalidRequest if the answer is constrained, and cannot be with these options.
        """
        if call.prompt_ids is not None or (effort is None and thinking is None):
            return call
        options = dict(call.thinking)
        if "thinking" not in call.asked:
            options |= self._renderer.thinking(effort_of(effort, "reasoning_effort"), "reasoning_effort")[1]
        if thinking is not None:
            options |= self._renderer.retention(thinking)
        settled = tuple(sorted(options.items()))
        if settled == call.thinking:
            return call
        tag = call.constrain and call.constrain(self._renderer.variant(settled)).structural_tag
        return msgspec.structs.replace(call, thinking=settled, structural_tag=tag)

    async def count(self, call: Call, figures: CallFigures, owner: str) -> int:
        """How many tokens the prompt of a call of this client key has, outside of any session.

        Raises InvalidRequest if it cannot be rendered, or has more tokens than twice the context.
        """
        self._renderer.refuse_too_long(call.messages)
        call = self._settled(call, self._reasoning_effort, None)
        renderer, (messages, tools) = self._renderer.variant(call.thinking), (call.messages, call.tools)
        try:
            ids = await self._rendered(partial(renderer.render, messages, tools), True, figures, owner)
            if not call.begun:
                return len(ids)
            work = partial(beginning, renderer, messages, tools, call.begun)
            begun = await self._rendered(work, True, figures, owner)
            return len(ids) + len(begun)
        except UNREADABLE as error:
            raise _unreadable(error) from error

    async def _rendered(self, work: Callable[[], T], heavy: bool, figures: CallFigures, owner: str) -> T:
        """Render a prompt, and count the time.

        Prompts of `heavy` requests are rendered in a few threads, so that few take memory at the same time.
        So are all prompts of a model's own template, which may take long.
        """
        time_of = PromptTime(self._renderer.tokenizer.spent)
        try:
            if heavy or self._renderer.stability is not None:
                async with self._turns.of(owner):
                    run = partial(time_of.run, work)
                    return await asyncio.get_running_loop().run_in_executor(self._encoders, run)
            return time_of.run(work)
        finally:
            figures.rendered(time_of.seconds, time_of.tokenizer_s)

    async def sample(self, generation: Generation, appended: Appended | None = None) -> None:
        """Sample the whole answer. Append each chunk to the generation, then call `appended`.

        If the caller is cancelled, or `appended` raises, the engine is told to abort, and the aborted answer
        is recorded.
        """

        def take(chunk: OutputChunk) -> Waits | None:
            generation.take(chunk)
            return None if appended is None else appended()

        began, accepted = clock.monotonic(), None

        def note(works: bool) -> None:
            nonlocal accepted
            if works and accepted is None:
                accepted = clock.monotonic()
            generation.at_engine = works

        try:
            name = f"{operation_of(generation)} {self._model_name}"
            with of_turn(generation.turn_id), span(name, "client") as traced:
                if traced.recording:
                    traced.set(asked_attributes(generation, self._model_name))
                await self._sampler.sample(self._sample_request(generation), take, note)
                if traced.recording:
                    traced.set(sampled_attributes(generation))
        except GatewayError as error:
            if generation.trial is not None and isinstance(error, EngineFault | NoServer):
                self._canary.failed(generation.trial)
            raise
        except BaseException:
            await self._recorder.record_aborted(generation)
            raise
        finally:
            generation.client.figures.sampled(began, accepted, clock.monotonic())

    def _sample_request(self, generation: Generation) -> SampleRequest:
        call, prompt = generation.call, generation.prompt
        interval = 1 if call.stream else WHOLE_ANSWER_INTERVAL
        experts_from = [generation.experts_from] if generation.train and self._router_replay else []
        if call.experts_from is not None:
            experts_from.append(call.experts_from)
        return SampleRequest(
            rid=generation.turn_id,
            session_id=generation.head.spec.session_id,
            owner=generation.head.spec.owner,
            allowed=generation.allowed,
            input_ids=collapsed(prompt.prompt_ids.tolist(), prompt.images),
            prompt_tokens=len(prompt.prompt_ids) if prompt.images else None,
            images=[PromptImage(call.images[image.sha256]) for image in prompt.images],
            image_pads=frozenset() if self._renderer.vision is None else self._renderer.vision.pads,
            parameters=engine_parameters(generation.sampling, self._renderer.stop_ids, call, interval),
            top_logprobs=call.top_logprobs,
            experts_from=min(experts_from, default=None) if self._router_replay else None,
            cache_salt=call.cache_salt,
            cached_at=prompt.parent.engine or "" if prompt.parent else "",
            cached_version=prompt.parent.versions[-1].version
            if prompt.parent and prompt.parent.versions
            else None,
        )

    def _locate(self, head: SessionHead, call: Call) -> Prompt:
        """Find the prompt of a call, and check its length and its ids. Raises InvalidRequest."""
        try:
            if call.prompt_ids is not None:
                self._refuse_pads(call.prompt_ids)
                prompt = locate_raw(head, call.prompt_ids)
            else:
                renderer = self._renderer.variant(call.thinking)
                prompt = locate(renderer, head, call.messages, call.tools)
                if call.begun:
                    begun = beginning(renderer, call.messages, call.tools, call.begun)
                    prompt = prompt.begin_answer(begun)
        except UNREADABLE as error:
            raise _unreadable(error) from error
        ids, context, vocabulary = prompt.prompt_ids, self._context_length, self._renderer.config.vocab_size
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if len(ids) >= context:
            message = f"the prompt has {len(ids)} tokens; the context holds {context}, the answer included"
            raise InvalidRequest(message, param="messages", code="context_length_exceeded")
        unchecked = not self._template_ids_are_valid or call.prompt_ids is not None
        if unchecked and not (ids.natural and max(ids) < vocabulary):  # such an id crashes an SGLang engine
            message = f"a token id lies outside the vocabulary of {vocabulary}"
            raise InvalidRequest(message, param="messages", code="token_out_of_vocabulary")
        return prompt

    def _refuse_pads(self, prompt_ids: TokenIds) -> None:
        """Raise InvalidRequest for a prompt of ids that holds tokens of an image."""
        vision = self._renderer.vision
        if vision is not None and not vision.pads.isdisjoint(prompt_ids):
            message = "a prompt of token ids has no images: send them in messages"
            raise InvalidRequest(message, param="prompt", code="images_in_token_ids")


def _unreadable(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the messages cannot be rendered: {error}", param="messages")
