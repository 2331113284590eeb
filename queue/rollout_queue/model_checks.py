"""The checks of a model at the start, as rows that its services compare: its files, its tokenizer, its output
head.

files       which are its weights, which ones nobody reads, which tensors it has
tokenizer   the ids of texts that tokenizers disagree about, as a digest

The output head: a weight of its own, or the embedding of the input (*tied*).

config.json says it ─┐
the model type's default ─▶ tied? ─┬─▶ versions need the head, or may leave it out
which of both is in the files ─────┘    or the start is refused: engines would sample with another head
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_queue.model_files import (
    CONFIG,
    FLOATS,
    INDEX,
    SUFFIX,
    TEXT_CONFIGS,
    BrokenWeights,
    ModelFiles,
    StoredTensor,
    named,
    same_bytes,
    text_config,
)
from rollout_queue.protocol.message import ModelCheck

QUANTIZATIONS = ("quantization_config", "compression_config")
TENSORS = "tensors"
"""The row whose detail is the same for trainer and engines that have the same model."""


def files_check(model: ModelFiles) -> ModelCheck:
    """The weights of the model, and the sets of weights beside them."""
    used = {path.name for path in model.weights}
    others = sorted({path.name for path in model.directory.glob(f"*{SUFFIX}")} - used)
    chosen = f", which {INDEX} names" if (model.directory / INDEX).exists() else ""
    if not others:
        return ModelCheck(check="weights", outcome="right", detail=f"{named(sorted(used))}{chosen}")
    detail = f"{named(sorted(used))}{chosen}; nobody reads {named(others)}"
    return ModelCheck(check="weights", outcome="differs", detail=detail)


def tensors_check(model: ModelFiles) -> ModelCheck:
    """Names, shapes and types, with a digest by which two services can be compared."""
    digest, types = hashlib.sha256(), set[str]()
    for name, (_, tensor) in sorted(model.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        types.add(tensor.dtype)
    count = f"{len(model.tensors)} tensors, {', '.join(sorted(types))}"
    return ModelCheck(check=TENSORS, outcome="right", detail=f"{count}, digest {digest.hexdigest()[:8]}")


def refuse_quantized(model: ModelFiles) -> None:
    """Raises BrokenWeights for quantized weights. Whole numbers in other models are buffers."""
    config = text_config(model.config)
    if (said := next(filter(config.get, QUANTIZATIONS), None)) is None:
        return
    for path, tensor in model.tensors.values():
        if tensor.dtype not in (*FLOATS, "F64"):
            raise BrokenWeights(quantized(tensor), file=path.name, tensor=tensor.name)
    reason = f"has {said}, and no weight is quantized: remove it, else engines quantize what is trained"
    raise BrokenWeights(reason, file=CONFIG)


def quantized(tensor: StoredTensor) -> str:
    return (
        f"is {tensor.dtype}, and quantized weights cannot be trained: give a copy of the model with "
        f"{', '.join(FLOATS)} tensors"
    )


TOKENIZER = "tokenizer"
"""The row whose detail is the same for gateway and trainer if both make the same ids of the same texts."""
LONG = "The quick brown fox, aged 27, doesn't jump over 3 lazy dogs. " * 500
"""A tokenizer.json that cuts cuts it."""
TEXTS = (
    LONG,
    "",
    " ",
    "  two spaces before,  two between, and after  ",
    "\ttabs\t\n\n\nlines \r\n of\r all kinds\n \n",
    "I'm you'll WE'RE it\u2019s can't",
    "1 12 123 1234 12345678901 3.14 1,000,000 \u0663\u0664 \u2168 \u00bd",
    "caf\u00e9 cafe\u0301 \u212b \ufb01 \uff21 na\u00efve Stra\u00dfe \u0130stanbul",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f",
    "\uc548\ub155 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f469\u200d\U0001f4bb \U0001f1eb\U0001f1f7 \u2764\ufe0f \U0001d54f",
    "a\u00a0b\u2003c\u200bd\ufeffe\u2028f\u0085g \u2581 \u0120 ##x",
    "\x00\x01\x1b[0m\x7f",
    "def f(x):\n    return {'a': [x**2, \"b\\n\"]}  # <b>&amp;</b>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa================\n----------------",
)


def tokenizer_check(encode: Callable[[str, bool], Sequence[int]], added: Sequence[str]) -> ModelCheck:
    """`encode` gives the ids of a text, with or without the tokens that a prompt begins and ends with.
    `added` are the texts of the tokens that were added to the vocabulary."""
    digest, count = hashlib.sha256(), 0
    for text in _texts(added):
        for framed in (False, True):
            ids = list(encode(text, framed))
            digest.update(f"{ids}\n".encode())
            count += len(ids)
    detail = (
        f"{len(TEXTS)} texts and {len(added)} added tokens are {count} ids, digest {digest.hexdigest()[:8]}"
    )
    return ModelCheck(check=TOKENIZER, outcome="right", detail=detail)


def _texts(added: Sequence[str]) -> Iterator[str]:
    yield from TEXTS
    yield "".join(f"a {each} b{each}" for each in sorted(added))


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
