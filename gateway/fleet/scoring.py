"""Scores prompts: what an engine's model thinks of each token, after the tokens before it.

prompt ids ──▶ server ──▶ one token is sampled and dropped ──▶ log-probabilities of the prompt
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from gateway.errors import EngineFault, RequestRefused
from gateway.fleet.event_stream import LOWEST_LOGPROB, engine_error
from gateway.fleet.failover import HARMLESS, NO_ADAPTER, RetryState, Sampler
from gateway.fleet.fleet_server import FleetServer
from gateway.fleet.generate_request import AllowedVersions, GenerateBody, SamplingParameters
from gateway.fleet.placement import WantedServer
from gateway.fleet.suspects import Case, request_digest
from rollout_queue import clock
from rollout_queue.foreign_json import read_json


class PromptQuery(NamedTuple):
    """Which scores of a prompt are wanted."""

    start: int
    """The position of the first token that is scored."""
    top_k: int = 0
    """How many of the likeliest tokens in the place of each."""
    candidates: Sequence[int] = ()
    """Ids that are scored in the place of each."""


class PromptScores(NamedTuple):
    """The scores of a prompt of N tokens, of the distribution at temperature 1."""

    logprobs: Sequence[float | None]
    """Nats, one for each token; None where no distribution is known: the first, and those not asked for."""
    top: Sequence[Sequence[tuple[float, int]]]
    """The likeliest tokens in its place, as (logprob, id); empty where they are not known."""
    candidates: Sequence[Sequence[float]]
    """Nats, one for each candidate; empty as `top`."""
    cached_tokens: int


Triple = tuple[float | None, int, str | None]


class _ScoredMeta(msgspec.Struct):
    input_token_logprobs: list[Triple]
    input_top_logprobs: list[list[Triple] | None] | None = None
    input_token_ids_logprobs: list[list[Triple] | None] | None = None
    cached_tokens: int | None = 0


class _Scored(msgspec.Struct):
    meta_info: _ScoredMeta


HEAVY_BYTES = 2**18
"""A larger reply is read in a thread, so that others do not wait."""
ONE_TOKEN = SamplingParameters(max_new_tokens=1, stop_token_ids=[])


class PromptScorer:
    """Scores on the fleet of a sampler."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def score(
        self,
        rid: str,
        session_id: str,
        owner: str,
        allowed: AllowedVersions,
        ids: Sequence[int],
        query: PromptQuery,
    ) -> PromptScores:
        """The scores of the prompt `ids`.

        Another server is tried after a fault, as for an answer without tokens. Raises RequestRefused,
        EngineFault or NoServer.
        """
        sampler, retries, avoid = self._sampler, RetryState(), ""
        case = Case(sampler.fleet.suspects, partial(request_digest, list(ids), ONE_TOKEN, []))
        body = GenerateBody(
            rid=rid,
            input_ids=list(ids),
            sampling_params=ONE_TOKEN,
            stream=False,
            logprob_start_len=max(0, query.start - 1),  # the first one that the engine scores has no score
            top_logprobs_num=query.top_k,
            token_ids_logprob=list(query.candidates) or UNSET,
        )
        while True:
            asked = WantedServer(session_id, allowed, avoid, owner=owner)
            server = await sampler.acquire(asked, sampler.engine_wait_s, case, retries)
            try:
                scores = await self._attempt(server, body, allowed)
                if case.needed:
                    await case.progressed(case.needed)
                return scores
            except EngineFault as fault:
                if await sampler.died(fault, server):
                    began = clock.monotonic()
                    await case.died(server.id, 0)
                    retries.waited(began)
                if fault.reason not in HARMLESS:
                    server.breaker.failed(unreachable=fault.reason == "refused")
                pause_s = retries.backoff_s(fault, sampler.engine_wait_s)
                body = msgspec.structs.replace(body, rid=f"{retries.faults}.{rid}")
                avoid = server.id
                await clock.sleep(pause_s)
            finally:
                await case.end()

    async def _attempt(
        self, server: FleetServer, body: GenerateBody, allowed: AllowedVersions
    ) -> PromptScores:
        adapter, url = server.adapter_of(allowed.version, allowed.adapter), server.registration.engine_url
        if adapter is not None:
            body = msgspec.structs.replace(body, lora_path=adapter.name)
        trial = server.enter()
        try:
            reply = await self._sampler.engine.whole(url, body)
        except RequestRefused as error:
            if adapter is not None and NO_ADAPTER.match(error.message):
                raise EngineFault("failed", error.message) from error
            raise
        except asyncio.CancelledError:
            await asyncio.shield(self._sampler.engine.abort(url, body.rid))
            raise
        finally:
            server.leave(trial)
        heavy = len(reply) > HEAVY_BYTES
        return await asyncio.to_thread(_scores, reply, body) if heavy else _scores(reply, body)


def _scores(reply: bytes, body: GenerateBody) -> PromptScores:
    """Raises EngineFault for a reply that contradicts itself."""
    try:
        meta = read_json(reply, _Scored).meta_info
    except msgspec.DecodeError as error:
        if b'"error"' in reply[:1000]:
            raise engine_error(200, reply[:10_000]) from error
        raise EngineFault("nonsense", f"the engine's scores cannot be read: {error}") from error
    scored, length = meta.input_token_logprobs, len(body.input_ids)
    if len(scored) > length:
        raise EngineFault("nonsense", f"{len(scored)} scores for a prompt of {length} tokens")
    unknown = length - len(scored)
    logprobs = [_finite(logprob) for logprob, _, _ in scored]
    top: list[list[tuple[float, int]]] = [[] for _ in range(length)]
    for at, each in enumerate(meta.input_top_logprobs or [] if body.top_logprobs_num else [], unknown):
        top[at] = [(_finite(logprob) or 0.0, token) for logprob, token, _ in each or []]
    candidates: list[list[float]] = [[] for _ in range(length)]
    if body.token_ids_logprob is not UNSET:
        found = meta.input_token_ids_logprobs or []
        candidates[unknown + 1 :] = [_of_candidates(each, body.token_ids_logprob) for each in found[1:]]
        if len(candidates) != length:
            raise EngineFault("nonsense", f"the engine scored candidates in {len(found)} of {length} places")
    if logprobs:
        logprobs[0], top[unknown] = None, []
    return PromptScores([None] * unknown + logprobs, top, candidates, meta.cached_tokens or 0)


def _of_candidates(scored: Sequence[Triple] | None, candidates: Sequence[int]) -> list[float]:
    """The scores of the candidates in one place. Raises EngineFault if those of others were told."""
    if [token for _, token, _ in scored or []] != candidates:
        raise EngineFault("nonsense", "the engine scored other tokens than the candidates")
    return [_finite(logprob) or 0.0 for logprob, _, _ in scored or []]


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
