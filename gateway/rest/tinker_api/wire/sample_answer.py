"""Writes a sample as the SDK reads it."""

from array import array
from collections.abc import Sequence

import msgspec

from gateway.fleet.scoring import PromptQuery, PromptScores
from gateway.generations.generation import Generation
from gateway.rest.tinker_api.wire import messages_pb2 as wire
from gateway.rest.tinker_api.wire.prompt_targets import PromptTargets

NO_LOGPROB = -99999.0
"""What stands in an empty cell of the likeliest tokens."""
Top = Sequence[Sequence[tuple[float, int]]]


class WantedScores(msgspec.Struct, frozen=True):
    """What a client wants to know of its prompt."""

    logprobs_from: int | None = None
    """The position of the first token whose log-probability is wanted; None: of none."""
    top: int = 0
    """How many likeliest tokens in the place of each of these."""
    targets: PromptTargets | None = None

    @property
    def query(self) -> PromptQuery | None:
        """What the engine is asked; None: nothing."""
        starts = [self.logprobs_from, None if self.targets is None else self.targets.start]
        known = [start for start in starts if start is not None]
        candidates = () if self.targets is None else self.targets.candidates
        return PromptQuery(min(known), self.top, candidates) if known else None

    def write(self, scores: PromptScores, response: wire.SampleResponse) -> None:
        """Add the engine's scores to the answer."""
        if self.logprobs_from is not None:
            wanted = [None if at < self.logprobs_from else each for at, each in enumerate(scores.logprobs)]
            values = (float("nan") if each is None else each for each in wanted)
            response.prompt_logprobs = array("f", values).tobytes()
            if self.top:
                top = [() if each is None else found for each, found in zip(wanted, scores.top, strict=True)]
                response.topk_prompt_logprobs.CopyFrom(_top(top, self.top))
        if self.targets is not None:
            response.target_prompt_logprobs.CopyFrom(self.targets.scored(scores.candidates))


def sample_response(
    generations: Sequence[Generation], top_k: int, wanted: WantedScores, scores: PromptScores | None
) -> bytes:
    """The message SampleResponse. `top_k`: how many likeliest tokens of each sampled one were asked for."""
    response = wire.SampleResponse(prompt_cache_hit_tokens=generations[0].cached_tokens)
    for generation in generations:
        response.sequences.append(_sequence(generation, top_k))
    if scores is not None:
        wanted.write(scores, response)
    encoded: bytes = response.SerializeToString()
    return encoded


def _sequence(generation: Generation, top_k: int) -> wire.SampledSequence:
    length = generation.finish == "length"
    sequence = wire.SampledSequence(
        stop_reason=wire.STOP_REASON_LENGTH if length else wire.STOP_REASON_STOP,
        tokens=array("i", generation.ids).tobytes(),
        logprobs=array("f", generation.logprobs).tobytes(),
    )
    if top_k:
        sequence.topk_sampled_logprobs.CopyFrom(_top(generation.top_logprobs, top_k))
    return sequence


def _top(top: Top, k: int) -> wire.TopkLogprobs:
    ids, logprobs = array("i"), array("f")
    for each in top:
        cells = [*each[:k], *[(NO_LOGPROB, 0)] * (k - len(each[:k]))]
        ids.extend(token for _, token in cells)
        logprobs.extend(logprob for logprob, _ in cells)
    return wire.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(top))
