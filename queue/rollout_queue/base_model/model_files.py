"""Which files of a model's directory are read: by trainer and engines alike, and into each published version.

weights   an index? ─▶ the files that it names     none ─▶ model.safetensors, else model*.safetensors
others    configuration, tokenizer, templates ─▶ copied     other weights, archives, code ─▶ left out
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rollout_queue.base_model.headers import BrokenWeights, StoredTensor, read_header
from rollout_queue.contract.policies.policy import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
"""The allowed names of published files: rollout servers and the trainer's HTTP server accept no others."""
SHARD = re.compile(r"(.+-)(\d{5})-of-(\d{5})(\..+)")
"""The names of the files among which the weights are divided."""
OTHER_WEIGHTS = (SUFFIX, ".bin", ".gguf", ".pt", ".pth")
COPIED = re.compile(r".*\.(json|jinja|model|model\.v\d+(m\d+)?|txt|tiktoken|bpe)")
"""Configuration, tokenizer, templates and processors, in all forms that readers of models know."""
NOT_COPIED = re.compile(rf".*\.index\.json|{re.escape(ADAPTER_CONFIG)}|{re.escape(MANIFEST)}")
"""What speaks of other weights than those that are beside the copy."""
MOST_BYTES = 64 * 2**20
"""The largest file that is copied. The largest tokenizers have half of it."""
TEMPLATES = "additional_chat_templates"
"""The only directory inside a model's that belongs to it. Versions lack it: engines get token ids."""
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where the config.json of a model that also reads images has the fields of the part that reads text."""
CHUNK_BYTES = 16 * 2**20
Located = tuple[Path, StoredTensor]
"""A tensor, and the file that has it."""


@dataclass(frozen=True)
class ModelFiles:
    """A directory in the Hugging Face layout, of which the headers are read, and no weights."""

    directory: Path
    weights: tuple[Path, ...]
    """The files that hold the model's weights. There may be others, which nobody reads."""
    tensors: Mapping[str, Located]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> "ModelFiles":
        """Raises BrokenWeights for files that contradict each other or are not there, and OSError."""
        weights = weight_files(directory)
        found: dict[str, Located] = {}
        for path in weights:
            for name, tensor in read_header(path).items():
                if name in found:
                    raise BrokenWeights(f"is also in {found[name][0].name}", file=path.name, tensor=name)
                found[name] = (path, tensor)
        for name, file in (_weight_map(directory) or {}).items():
            if name not in found or found[name][0].name != file:
                raise BrokenWeights(f"is not in {file}, which it names", file=INDEX, tensor=name)
        return cls(directory, weights, found, json_object(directory / CONFIG))

    @property
    def ambiguous(self) -> bool:
        """Whether a reader would take other files. Without an index, SGLang reads all safetensors files;
        transformers prefers `model.safetensors` to an index, and the base of an adapter to both."""
        names, indexed = {path.name for path in self.weights}, (self.directory / INDEX).exists()
        others = {path.name for path in self.directory.glob(f"*{SUFFIX}")} - names
        if (self.directory / ADAPTER_CONFIG).exists():
            return True
        if indexed:  # transformers reads its metadata
            return WEIGHTS in others or "metadata" not in json_object(self.directory / INDEX)
        return bool(others) or names != {WEIGHTS}

    def linked(self, into: Path) -> Path:
        """Make `into` a directory of links to what is to be read, and to nothing that misleads a reader."""
        into.mkdir(parents=True, exist_ok=True)
        for old in into.iterdir():
            old.unlink()
        names = {path.name for path in self.weights}
        for path in self.directory.absolute().iterdir():
            foreign = path.name.endswith((SUFFIX, f"{SUFFIX}.index.json")) and path.name not in names
            if not foreign and path.name != ADAPTER_CONFIG:
                (into / path.name).symlink_to(path)
        if names != {WEIGHTS}:
            weight_map = {name: path.name for name, (path, _) in self.tensors.items()}
            (into / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8")
        return into


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The files that hold the weights of a model or a version. Raises BrokenWeights, OSError."""
    weight_map = _weight_map(directory)
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        for name in names:
            if not FILE_NAME.fullmatch(name) or not name.endswith(SUFFIX):
                raise BrokenWeights(f"names {name!r}, which is no {SUFFIX} file beside it", file=INDEX)
            if not (directory / name).is_file():
                raise BrokenWeights(f"is missing, and {INDEX} names it", file=name)
        if not names:
            raise BrokenWeights("names no tensor: remove it if the weights are in one file", file=INDEX)
        return tuple(directory / name for name in names)
    if (directory / WEIGHTS).is_file():
        return (directory / WEIGHTS,)
    others = [path for path in directory.glob(f"*{SUFFIX}") if path.name != ADAPTER_WEIGHTS]
    if not others:
        beside = sorted(path.name for path in directory.glob("*") if path.suffix in OTHER_WEIGHTS)
        only = f", only {named(beside)}" if beside else ""
        raise BrokenWeights(f"no {SUFFIX} file of a model in {directory}{only}")
    found = sorted([path for path in others if path.name.startswith("model")] or others)
    _refuse_lost_shards({path.name for path in found})
    return tuple(found)


def small_files(directory: Path) -> tuple[list[Path], list[Path]]:
    """The files beside the weights that travel with each version, and those that are left out. Of weights,
    `weight_files` decides."""
    kept, left_out = list[Path](), list[Path]()
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.name.endswith((SUFFIX, INDEX)):
            copied = COPIED.fullmatch(path.name) and not NOT_COPIED.fullmatch(path.name)
            named = FILE_NAME.fullmatch(path.name)
            fits = copied and named and path.stat().st_size <= MOST_BYTES
            (kept if fits else left_out).append(path)
    return kept, left_out


def templates(directory: Path) -> list[Path]:
    """The further chat templates of a model, in a directory of their own."""
    found = (directory / TEMPLATES).glob("*.jinja")
    return sorted(
        path for path in found if FILE_NAME.fullmatch(path.name) and path.stat().st_size <= MOST_BYTES
    )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the part that reads and writes text, and those of the whole model beside them."""
    parts = (config.get(name) for name in TEXT_CONFIGS)
    text: dict[str, Any] = next((part for part in parts if isinstance(part, dict)), {})
    return {**config, **{name: value for name, value in text.items() if value is not None}}


def json_object(path: Path) -> dict[str, Any]:
    """Raises BrokenWeights."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenWeights(f"cannot be read: {error}", file=path.name) from error
    if not isinstance(value, dict):
        raise BrokenWeights("is not a JSON object", file=path.name)
    return value


def same_bytes(one: Located, other: Located) -> bool:
    """Whether two tensors are equal, bit by bit. Raises OSError."""
    if (one[1].dtype, one[1].shape) != (other[1].dtype, other[1].shape):
        return False
    pairs = zip_longest(_chunks_of(one), _chunks_of(other))
    return all(chunk == other_chunk for chunk, other_chunk in pairs)


def named(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 2 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _refuse_lost_shards(names: Set[str]) -> None:
    """Raises BrokenWeights if a file is missing that the numbers in the names of others count."""
    for name in sorted(names):
        if shard := SHARD.fullmatch(name):
            before, _, count, after = shard.groups()
            every = (f"{before}{number:05}-of-{count}{after}" for number in range(1, int(count) + 1))
            if lost := next((each for each in every if each not in names), None):
                raise BrokenWeights(f"is missing, and {name} is one of {int(count)} files", file=lost)


def _weight_map(directory: Path) -> Mapping[str, str] | None:
    """What the index says; None without one."""
    if not (directory / INDEX).exists():
        return None
    found = json_object(directory / INDEX).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise BrokenWeights("has no weight_map from tensors to files", file=INDEX)
    return found


def _chunks_of(place: Located) -> Iterator[bytes]:
    path, tensor = place
    with path.open("rb") as file:
        file.seek(tensor.start)
        left = tensor.end - tensor.start
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
