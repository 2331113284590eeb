"""Writes a sample as the SDK reads it."""

from array import array
from collections.abc import Sequence

from gateway.engines.scoring import PromptScores
from gateway.generations.generation import Generation
from gateway.rest.tinker_api.wire import messages_pb2 as wire

NO_LOGPROB = -99999.0
"""What stands in an empty cell of the likeliest tokens."""
Top = Sequence[Sequence[tuple[float, int]]]


def sample_response(
    generations: Sequence[Generation], scores: PromptScores | None, top_k: int, prompt_top: int
) -> bytes:
    """The message SampleResponse. `top_k` and `prompt_top`: how many likeliest tokens were asked for."""
    response = wire.SampleResponse(prompt_cache_hit_tokens=generations[0].cached_tokens)
    for generation in generations:
        response.sequences.append(_sequence(generation, top_k))
    if scores is not None:
        values = (float("nan") if each is None else each for each in scores.logprobs)
        response.prompt_logprobs = array("f", values).tobytes()
        if prompt_top:
            response.topk_prompt_logprobs.CopyFrom(_top(scores.top, prompt_top))
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
