"""The output head of a model: a weight of its own, or the embedding of the input (*tied*).

config.json says it ─┐
the model type's default ─▶ tied? ─┬─▶ versions need the head, or may leave it out
which of both is in the files ─────┘    or the start is refused: engines would sample with another head
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_queue.base_model.headers import BrokenWeights
from rollout_queue.base_model.model_files import CONFIG, TEXT_CONFIGS, ModelFiles, same_bytes
from rollout_queue.protocol.model_checks import ModelCheck

EMBEDDING = re.compile(r"(?!mtp\.)(?:[a-z_]+\.)*(?:embed_tokens|wte|word_embeddings|embed_in)\.weight")
HEAD = re.compile(r"(?!mtp\.)(?:[a-z_]+\.)*(?:lm_head|embed_out)\.weight")
USUAL_HEAD = "lm_head.weight"
KEY = "tie_word_embeddings"

DefaultTied = Callable[[], bool | None]
"""Whether models of this type are tied if config.json does not say it; None if that is not known."""


@dataclass(frozen=True)
class OutputHead:
    """What a version may leave out, and why."""

    optional: Mapping[str, tuple[int, ...]]
    """The head's name and shape, if versions may lack it."""
    detail: str

    @property
    def check(self) -> ModelCheck:
        return ModelCheck(check="output head", outcome="right", detail=self.detail)


def output_head(model: ModelFiles, default: DefaultTied) -> OutputHead:
    """Find out how a model has its head. Raises BrokenWeights for a head that trainer and engines would take
    from different places, and OSError."""
    head, embedding = _shortest(HEAD, model.tensors), _shortest(EMBEDDING, model.tensors)
    tied = said_tied(model.config)
    if head is not None and embedding is not None:
        if tied is False:
            return OutputHead({}, f"{head} is a weight of its own")
        if same_bytes(model.tensors[head], model.tensors[embedding]):
            shape = model.tensors[head][1].shape
            return OutputHead({head: shape}, f"{head} equals {embedding}: versions have the latter alone")
        if tied or (tied is None and default()):
            raise BrokenWeights(_other_head(embedding, said=tied is not None), tensor=head)
        return OutputHead({}, f"{head} is a weight of its own")
    if head is not None:
        if not any("emb" in name or "wte" in name for name in model.tensors):
            reason = (
                f"is there, and no embedding: engines take the embedding from its own tensor, not from {head}"
            )
            raise BrokenWeights(reason, tensor=head)
        return OutputHead({}, f"{head} is a weight of its own")
    if embedding is None:
        return OutputHead({}, "it has another name than usual")
    said = (
        f"{CONFIG} says {KEY}: false" if tied is not None else "models of this type have a head of their own"
    )
    if tied is False or (tied is None and default() is False):
        if not embedding.endswith("embed_tokens.weight"):
            return OutputHead({}, "it has another name than usual")
        raise BrokenWeights(f"is missing, and {said}: add it, or set {KEY} to true", tensor=USUAL_HEAD)
    shape = model.tensors[embedding][1].shape
    return OutputHead({USUAL_HEAD: shape}, f"it is {embedding}")


def said_tied(config: Mapping[str, Any]) -> bool | None:
    """What config.json says; None if it says nothing."""
    parts = [config, *(config.get(name) for name in TEXT_CONFIGS)]
    said = [part.get(KEY) for part in parts if isinstance(part, dict)]
    return next((value for value in said if isinstance(value, bool)), None)


def _other_head(embedding: str, *, said: bool) -> str:
    why = (
        f"{CONFIG} says {KEY}: true"
        if said
        else f"models of this type are tied unless {CONFIG} says {KEY}: false"
    )
    return (
        f"differs from {embedding}, and {why}, so engines would ignore it: set {KEY} to false if the head is "
        "meant, or remove it"
    )


def _shortest(pattern: re.Pattern[str], names: Iterable[str]) -> str | None:
    return min((name for name in names if pattern.fullmatch(name)), key=len, default=None)
