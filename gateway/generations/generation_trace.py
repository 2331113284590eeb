"""What the spans of one generation say, by the conventions `gen_ai.*` and our own `rl.*`. No text of it."""

from gateway.generations.generation import Generation
from rollout_queue.contract.records import Turn
from rollout_queue.signals.tracing.spans import Attributes


def operation_of(generation: Generation) -> str:
    """What the engine does, in the names of the conventions."""
    return "chat" if generation.call.prompt_ids is None else "text_completion"


def asked_attributes(generation: Generation, model: str) -> Attributes:
    """Of the call to an engine."""
    used = generation.sampling.used
    return {
        "gen_ai.operation.name": operation_of(generation),
        "gen_ai.provider.name": "sglang",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": used.get("temperature"),
        "gen_ai.request.top_p": used.get("top_p"),
        "gen_ai.request.max_tokens": used.get("max_new_tokens"),
        "gen_ai.request.stream": generation.call.stream,
        "gen_ai.conversation.id": generation.head.spec.session_id,
        "gen_ai.usage.input_tokens": len(generation.prompt.prompt_ids),
        "rl.turn.id": generation.turn_id,
    }


def sampled_attributes(generation: Generation) -> Attributes:
    """Of the answer, once it is complete."""
    return {
        "gen_ai.response.id": generation.completion_id,
        "gen_ai.response.finish_reasons": [generation.finish] if generation.finish else None,
        "gen_ai.usage.output_tokens": len(generation.ids),
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        "rl.server": generation.engine or None,
        "rl.policy.version": generation.versions[-1].version if generation.versions else None,
    }


def recorded_attributes(turn: Turn) -> Attributes:
    """Of the append to Redis."""
    return {
        "messaging.system": "redis",
        "messaging.operation.type": "send",
        "rl.turn.id": turn.turn_id,
        "rl.turn.relation": turn.relation,
        "rl.turn.finish": turn.finish,
        "rl.turn.train": turn.train,
        "rl.session.id": turn.session_id,
        "rl.group.id": turn.group_id,
        "rl.task.id": turn.task_id,
    }
