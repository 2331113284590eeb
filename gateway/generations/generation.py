"""One generation, for any dialect: its call, its position in the session, and what was sampled so far.

A call, or its session, may name the policy that must answer:

policy             any version that the fleet serves
policy@12          version 12
policy:math        the newest version of the adapter `math`
policy:math@3      its version 3
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from gateway.counters import CallFigures
from gateway.errors import InvalidRequest, ObjectNotFound
from gateway.fleet.event_stream import OutputChunk
from gateway.fleet.fleet import Fleet
from gateway.fleet.generate_request import AllowedVersions
from gateway.generations.conversation import Prompt
from gateway.language.chat_messages import Message, Tool
from gateway.language.constraint import Constrain
from gateway.language.thinking import Options
from gateway.policies.adapter_policies import AdapterPolicies
from gateway.policies.canary_watch import Trial
from gateway.settings import GatewaySettings
from rollout_queue import clock
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.ids import new_id
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Finish, RoutedExperts, Sampling, Span, Turn


class PolicyName(NamedTuple):
    """A policy as a caller names it."""

    base: str
    adapter: str | None
    version: int | None


class Pinned(NamedTuple):
    """What must answer a call; without a version, any that the fleet serves."""

    version: int | None = None
    adapter: str | None = None
    """The name of the adapter whose version that is; None for the fleet's policy."""

    def name(self, model_name: str) -> str:
        """As in the record of a turn."""
        adapter = "" if self.adapter is None else f":{self.adapter}"
        return f"{model_name}{adapter}" + ("" if self.version is None else f"@{self.version}")


async def pinned(
    settings: GatewaySettings, fleet: Fleet, adapters: AdapterPolicies, model: str | None, policy: str | None
) -> Pinned:
    """What `model` names, or else the session's `policy`.

    Raises ObjectNotFound for a model or version that nobody serves, InvalidRequest for a malformed version.
    """
    named = policy_name(model or settings.model_name, "model")
    if named.base != settings.model_name:
        if settings.strict_models:
            raise ObjectNotFound(f"no model {model!r}", param="model", code="model_not_found")
        named = PolicyName(named.base, None, None)  # harnesses hard-code names: the policy answers them
    if named.adapter is None and named.version is None and policy is not None:
        named = policy_name(policy, "policy")
    if named.adapter is not None:
        return Pinned(await adapters.version_of(named.adapter, named.version), named.adapter)
    if named.version is not None and not fleet.has(named.version):
        how = f"POST /admin/policies/{named.version}/pin has one keep it"
        message = f"no server serves version {named.version}; {how}"
        raise ObjectNotFound(message, param="model", code="model_not_found")
    return Pinned(named.version)


def policy_name(name: str, param: str) -> PolicyName:
    """The parts of a name such as `policy:math@3`. Raises InvalidRequest if the version is no number."""
    whole, at, version = name.partition("@")
    base, _, adapter = whole.partition(":")
    if not at:
        return PolicyName(base, adapter or None, None)
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        raise InvalidRequest(f"{param}: {name!r}: a version is a number", param=param)
    return PolicyName(base, adapter or None, int(version))


MOST_TOKENS_WITH_EXPERTS = 16384
"""A turn records the experts of at most so many tokens, its last ones: 6 MiB with 48 layers and 8 experts."""


class ClientCall(Protocol):
    """The client's side of a call, as far as the record of a turn needs it."""

    digest: str
    """Equal for equal requests."""
    attempt: int
    """How often the client had made this call before, when the generation began."""
    latest_attempt: int
    """The last attempt, by number, that joined the call. A retry joins the call in flight that it repeats."""
    joined_at: float
    """When that attempt joined, in seconds since the epoch; 0 if none did."""
    figures: CallFigures
    """The metrics of the calls in the client's dialect."""

    async def wait_for_reader(self) -> None:
        """Wait until a client reads the answer. If none comes, the whole call is cancelled."""
        ...


class UnreadCall(msgspec.Struct):
    """The client's side of a call whose answer is stored, so that no client has to read it."""

    digest: str
    attempt: int
    latest_attempt: int
    figures: CallFigures
    joined_at: float = 0.0

    async def wait_for_reader(self) -> None:
        return


class Call(msgspec.Struct, frozen=True):
    """A call in the form that is the same for all dialects."""

    messages: Sequence[Message]
    tools: list[Tool] | None = None
    asked: Mapping[str, Any] = {}
    """Sampling parameters that the caller sent, in OpenAI's names."""
    stop: list[str] = []
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer, beside the template's."""
    ignore_eos: bool = False
    """No token ends the answer."""
    cache_salt: str | None = None
    experts_from: int | None = None
    """The position of the first token whose routed experts the reply has; None if it has none."""
    stream: bool = False
    top_logprobs: int = 0
    structural_tag: str | None = None
    """The grammar of the answer, as JSON; None if it is not constrained."""
    constrain: Constrain | None = None
    """Makes the grammar for a template with other options; None if the answer is not constrained."""
    prompt_ids: TokenIds | None = None
    """The prompt of a call without a chat template; `messages` are empty then."""
    user: str | None = None
    """The end user whom the caller names."""
    images: Mapping[str, bytes] = {}
    """The PNGs of the images in the messages, by hash."""
    thinking: Options = ()
    """The template's options that this call sets."""
    ignored_fields: tuple[str, ...] = ()
    """The paths of fields of the request that the gateway did not know, and ignored."""
    begun: str = ""
    """The text with which the caller begins the answer. It is neither sampled nor part of the reply."""


class Generation(msgspec.Struct):
    """One answer while it is sampled."""

    call: Call
    head: SessionHead
    prompt: Prompt
    sampling: Sampling
    completion_id: str
    """The id of the reply; the choices of one call share it."""
    client: ClientCall
    """Who reads the answer, and which attempt at the call this is."""
    index: int = 0
    """The number of this answer among the choices of its call."""
    train: bool = True
    side_call: str | None = None
    pinned: Pinned = Pinned()
    """What must answer."""
    trial: Trial | None = None
    """Its part in an open canary."""
    max_row_tokens: int | None = None
    """The tokens of prompt and answer with which it could no longer be trained; None if there is no bound."""
    turn_id: str = msgspec.field(default_factory=new_id)
    started_at: float = msgspec.field(default_factory=clock.now)
    engine: str = ""
    """The id of the server that sampled it; of the last one, if several did."""
    ids: list[int] = []
    logprobs: list[float] = []
    top_logprobs: list[list[tuple[float, int]]] = []
    cached_tokens: int = 0
    """How many tokens of the prompt were in the cache of the engine that began the answer."""
    finish: str | None = None
    matched: str | None = None
    end_id: int | None = None
    """The token that ended the answer, as the engine names it."""
    reasoning_tokens: int = 0
    """How many of the tokens are the answer's thought, once the answer is read."""
    versions: tuple[Span, ...] = ()
    """Which version sampled which part. Before the last chunk, this follows from the chunks so far."""
    experts: RoutedExperts | None = None
    """The experts that the engine chose, as the turn records them."""
    at_engine: bool = False
    """An engine has accepted the request and has not failed since."""
    recorded: bool = False
    """The answer is recorded, or is being recorded."""
    trace: str | None = None
    """The span that records it."""

    def take(self, chunk: OutputChunk) -> None:
        """Append a chunk."""
        start = len(self.ids)
        if not start:  # an engine that continues the answer counts the answer's tokens too
            self.cached_tokens = max(0, min(chunk.cached_tokens, len(self.prompt.prompt_ids)))
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self.top_logprobs += chunk.top_logprobs
        self.engine = chunk.server
        if chunk.finish is not None:
            self.finish, self.matched, self.versions = chunk.finish, chunk.matched, chunk.versions
            self.end_id, self.experts = chunk.end_id, chunk.experts
        elif self.versions and self.versions[-1].version == chunk.version:
            self.versions = (*self.versions[:-1], Span(chunk.version, self.versions[-1].start, len(self.ids)))
        else:
            self.versions = (*self.versions, Span(chunk.version, start, len(self.ids)))

    @property
    def text_tokens(self) -> int:
        """How many tokens the answer's text has: all but the one that ended it."""
        return len(self.ids) - bool(self.ids and self.ids[-1] == self.end_id)

    @property
    def allowed(self) -> AllowedVersions:
        """Which versions may answer."""
        return (
            AllowedVersions(self.pinned.version, self.pinned.adapter)
            if self.trial is None
            else self.trial.allowed
        )

    def turn(self, policy: str, finish: Finish, reply_digest: str) -> Turn:
        """The record of this generation. Raises InvalidRecord if the answer contradicts itself."""
        spec, prompt = self.head.spec, self.prompt
        return Turn(
            turn_id=self.turn_id,
            session_id=spec.session_id,
            parent_id=prompt.parent.turn_id if prompt.parent else None,
            group_id=spec.group_id,
            task_id=spec.task_id,
            policy=(spec.policy or policy) if self.pinned.version is None else self.pinned.name(policy),
            attempt=self.client.attempt,
            joined_attempt=self.client.latest_attempt if self.client.joined_at else 0,
            joined_at=self.client.joined_at,
            lineage=spec.lineage,
            user=self.call.user,
            ignored_fields=self.call.ignored_fields,
            relation=prompt.relation,
            reason=prompt.reason,
            side_call=self.side_call,
            context_ids=prompt.context_ids,
            output_ids=TokenIds(self.ids),
            logprobs=Logprobs(self.logprobs),
            versions=self.versions,
            sampling=self.sampling,
            finish=finish,
            train=self.train,
            started_at=self.started_at,
            finished_at=clock.now(),
            engine=self.engine,
            completion_id=self.completion_id,
            prompt_digest=prompt.digest.hex(),
            reply_digest=reply_digest,
            request_digest=self.client.digest,
            experts=self._own_experts(),
            images=prompt.own_images,
            trace=self.trace,
        )

    def _own_experts(self) -> RoutedExperts | None:
        """The experts that the turn records; the reply may have those of earlier tokens, too."""
        if self.experts is None or not self.train:
            return None
        rows = len(self.prompt.prompt_ids) + len(self.ids) - 1 - self.experts_from
        return self.experts.last(min(rows, MOST_TOKENS_WITH_EXPERTS))

    @property
    def experts_from(self) -> int:
        """The position of the first token whose experts the turn records: its parent's last token, or the
        first of as many as one turn records."""
        prompt = self.prompt
        own = len(prompt.prompt_ids) - len(prompt.context_ids) - (prompt.parent is not None)
        return max(own, len(prompt.prompt_ids) - MOST_TOKENS_WITH_EXPERTS)


def tokens_of(generations: Sequence[Generation], n: int) -> tuple[int, int]:
    """How many tokens the prompts and the answers of one request have, with `n` answers to each prompt."""
    prompts = sum(len(each.prompt.prompt_ids) for each in generations[::n])
    return prompts, sum(len(each.ids) for each in generations)
