"""Which files of a model's directory are read: by trainer and engines alike, and into each published version.

weights   an index? ─▶ the files that it names     none ─▶ model.safetensors, else model*.safetensors
others    configuration, tokenizer, templates ─▶ copied     other weights, archives, code ─▶ left out

A file's safetensors header says which tensors it has:

file = 8 bytes header length (little-endian) · JSON header {tensor: {dtype, shape, data_offsets}} · data
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rollout_queue.contract.published_policy import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per value of the types that weights may have."""
ITEM_BYTES = FLOATS | {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Also those of the other tensors in a model's files, such as whole numbers in buffers."""
MAX_HEADER_BYTES = 100_000_000
POINTER = b"version "
"""How a file begins that Git LFS would replace. No header is that long."""


class BrokenWeights(Exception):
    """A set of weights that must not reach an engine. The text names the file and, if known, the tensor."""

    def __init__(self, reason: str, *, file: str | None = None, tensor: str | None = None) -> None:
        where = f"{file or 'weights'}: " + (f"tensor {tensor!r}: " if tensor else "")
        super().__init__(where + reason)
        self.file = file
        self.tensor = tensor


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a header declares it; `start` and `end` count bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises BrokenWeights unless they fill the file exactly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        text = file.read(8)
        text += file.read(header_bytes(text, size, path.name) - 8)
    if len(text) < 8:
        raise BrokenWeights(f"is truncated: {size} bytes do not hold the header", file=path.name)
    return parse_header(text[8:], size, path.name)


def header_bytes(beginning: bytes | bytearray, size: int, name: str) -> int:
    """How many bytes the header of a file of `size` bytes has, with its length; 8 if `beginning` ends before
    that. Raises BrokenWeights if the file is too short for its header."""
    if size < 8:
        raise BrokenWeights(f"is truncated: {size} bytes do not hold the header", file=name)
    first = bytes(memoryview(beginning)[:8])
    if first == POINTER:
        raise BrokenWeights("is a pointer of Git LFS: fetch the file itself with `git lfs pull`", file=name)
    if len(first) < 8:
        return 8
    length = int.from_bytes(first, "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise BrokenWeights(f"is truncated: {size} bytes do not hold the header", file=name)
    return 8 + length


def parse_header(text: bytes, size: int, name: str) -> dict[str, StoredTensor]:
    """The tensors of a file of `size` bytes by name, from its header without the length. Raises BrokenWeights
    unless they fill the file exactly."""
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("not an object")
        header.pop("__metadata__", None)
        data_start = 8 + len(text)
        tensors = {each: _stored(name, each, entry, data_start) for each, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenWeights(f"has no safetensors header: {error}", file=name) from error
    _require_exact_fill(name, tensors, 8 + len(text), size)
    return tensors


def _stored(file: str, name: str, entry: Any, data_start: int) -> StoredTensor:
    dtype, shape = entry["dtype"], entry["shape"]
    begin, end = entry["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise BrokenWeights(f"dtype {dtype} is not one of {', '.join(FLOATS)}", file=file, tensor=name)
    numbers = [begin, end, *shape]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise BrokenWeights("shape or offsets are not whole numbers", file=file, tensor=name)
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise BrokenWeights(
            f"{end - begin} bytes do not hold shape {shape} of {dtype}", file=file, tensor=name
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _require_exact_fill(name: str, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != position:
            raise BrokenWeights("its bytes overlap others or leave a hole", file=name, tensor=tensor.name)
        position = tensor.end
    if position != size:
        raise BrokenWeights(f"is truncated or too long: {size} bytes, its header says {position}", file=name)


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
