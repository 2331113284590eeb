"""Verifies a set of weights before an engine loads it: pure checks on files, without torch.

manifest.json ─▶ read_manifest ─▶ Manifest ┐
initial model ─▶ ExpectedModel ────────────┼─▶ verify_directory ─▶ fine, or BrokenWeights
files ─────────────────────────────────────┘

What transformers assumes of a type of model where config.json is silent, is read from its source: importing a
configuration of transformers imports torch, which takes seconds, and memory that this process keeps.

A LoRA adapter is checked in PEFT's layout: SGLang 0.5.23 accepts an adapter that has one half of a fused
layer only, and its process dies at the first call. It ignores the options that it does not know, such as
rank-stabilised scaling, and would apply another adapter than the one that was trained. So both are refused
here.
"""

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollout_queue.contract.published_policy import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DELTA_SUFFIX,
    MANIFEST,
    STABLE,
    DeltaFile,
    FileSpec,
    Manifest,
)
from rollout_queue.model_checks import files_check, output_head, refuse_quantized, tensors_check
from rollout_queue.model_files import CONFIG, FLOATS, INDEX, Located, ModelFiles, json_object, same_bytes
from rollout_queue.protocol.message import ModelCheck
from rollout_server.settings import EngineLoraSettings
from rollout_server.weights.weight_files import (
    WEIGHTS_SUFFIX,
    BrokenWeights,
    CheckedFile,
    StoredTensor,
    check_path,
)


def tied_by_default(model_type: object) -> bool | None:
    """Whether models of this type take the embedding as their output head; None if that is not known."""
    marker = f'model_type = "{model_type}"'
    for path in _configurations():
        text = path.read_text(encoding="utf-8")
        if marker in text:
            classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
            of_type = (each for each in classes if _value(each, "model_type") == model_type)
            value = next((_value(each, "tie_word_embeddings") for each in of_type), None)
            return value if isinstance(value, bool) else None
    return None


def _configurations() -> Iterator[Path]:
    found = importlib.util.find_spec("transformers")
    for location in (found.submodule_search_locations or ()) if found is not None else ():
        yield from sorted(Path(location).glob("models/*/configuration_*.py"))


def _value(of: ast.ClassDef, name: str) -> object:
    """What the class assigns to this attribute; None without a plain value."""
    for node in of.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return node.value.value
    return None


TENSOR = re.compile(r"base_model\.model\.(?P<layer>[^ ]+)\.lora_(?P<factor>[AB])\.weight")
FUSED = (("q_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang fuses with each other: an adapter has both or none. `k_proj` may be missing."""
NOT_APPLIED = (
    "alpha_pattern",
    "bias",
    "fan_in_fan_out",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "use_dora",
    "use_rslora",
)
"""Options that change what an adapter computes, and that SGLang does not apply."""
OFF: tuple[Any, ...] = (None, False, "none", [], {})


def check_adapter(
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    lora: EngineLoraSettings,
) -> None:
    """Raises BrokenWeights unless the engine can apply the adapter to its model, whose tensors have
    `shapes`."""
    rank = _check_config(config, lora)
    layers: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        if (found := TENSOR.fullmatch(name)) is None:
            raise BrokenWeights("is no tensor of a LoRA adapter", file=ADAPTER_WEIGHTS, tensor=name)
        layer, factor = found["layer"], found["factor"]
        shape = shapes.get(f"{layer}.weight", ())
        if len(shape) != 2:
            raise BrokenWeights("its layer is not in the engine's model", file=ADAPTER_WEIGHTS, tensor=name)
        expected = (rank, shape[1]) if factor == "A" else (shape[0], rank)
        if tensor.shape != expected:
            reason = f"has shape {list(tensor.shape)}, the engine's model needs {list(expected)}"
            raise BrokenWeights(reason, file=ADAPTER_WEIGHTS, tensor=name)
        layers.setdefault(layer, set()).add(factor)
    _check_layers(layers, lora)


def _check_config(config: Mapping[str, Any], lora: EngineLoraSettings) -> int:
    """The adapter's rank."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA":
        raise BrokenWeights(f"peft_type is {config.get('peft_type')!r}, not 'LORA'", file=ADAPTER_CONFIG)
    if not isinstance(rank, int) or not 0 < rank <= lora.max_rank:
        reason = f"r is {rank!r}; the engine takes 1 to {lora.max_rank} (rollout_server.lora.max_rank)"
        raise BrokenWeights(reason, file=ADAPTER_CONFIG)
    if not isinstance(alpha, int | float) or not alpha > 0:
        raise BrokenWeights(f"lora_alpha is {alpha!r}, and not above 0", file=ADAPTER_CONFIG)
    if not isinstance(config.get("target_modules"), str | list):
        raise BrokenWeights("target_modules is missing", file=ADAPTER_CONFIG)
    for option in NOT_APPLIED:
        if config.get(option) not in OFF:
            raise BrokenWeights(
                f"{option} is {config[option]!r}, which SGLang does not apply", file=ADAPTER_CONFIG
            )
    return rank


def _check_layers(layers: Mapping[str, set[str]], lora: EngineLoraSettings) -> None:
    if not layers:
        raise BrokenWeights("has no tensors", file=ADAPTER_WEIGHTS)
    for layer, factors in layers.items():
        path, _, module = layer.rpartition(".")
        if module not in lora.target_modules:
            reason = f"adapts {layer}, and {module} is not in rollout_server.lora.target_modules"
            raise BrokenWeights(reason, file=ADAPTER_WEIGHTS)
        if factors != {"A", "B"}:
            raise BrokenWeights(f"has only one factor of {layer}", file=ADAPTER_WEIGHTS)
        for fused in FUSED:
            if module in fused or (module == "k_proj" and "q_proj" in fused):
                missing = [other for other in fused if f"{path}.{other}" not in layers]
                if missing:
                    reason = f"adapts {layer} without {missing[0]}, which SGLang fuses with it"
                    raise BrokenWeights(reason, file=ADAPTER_WEIGHTS)


THREADS = 4
"""How many files are read at once."""
FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
RESERVED = frozenset({".", "..", MANIFEST, STABLE})
CODE_SUFFIXES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth", ".py", ".so"})
"""Endings of files that run code when they are loaded: no policy may contain them."""
SHAPING_KEYS = (
    "architectures",
    "head_dim",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)
"""Keys that a published config must not change. A reload keeps the engine's config, but a restart reads the
new one, so the model would change at the restart."""


@dataclass(frozen=True)
class ExpectedModel:
    """The names, types and shapes of the tensors of the engine's model, and the model's config."""

    tensors: Mapping[str, Located]
    optional: Mapping[str, tuple[int, ...]]
    """Names and shapes of tensors that the files may lack: an output head that is the embedding (tied)."""
    config: Mapping[str, Any]
    lora: EngineLoraSettings | None = None
    """The adapters that the engine takes; None if it takes none."""
    checks: tuple[ModelCheck, ...] = ()
    """What was found out about the model."""

    @classmethod
    def of(cls, model_path: Path, lora: EngineLoraSettings | None = None) -> "ExpectedModel":
        """Read the model in the directory that the engine starts with. Raises BrokenWeights, OSError."""
        model = ModelFiles.read(model_path)
        head = output_head(model, lambda: tied_by_default(model.config.get("model_type")))
        refuse_quantized(model)
        checks = (files_check(model), tensors_check(model), head.check)
        return cls(model.tensors, head.optional, model.config, lora, checks)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Those of all tensors that files may have."""
        return {name: tensor.shape for name, (_, tensor) in self.tensors.items()} | dict(self.optional)

    def takes(self, tensor: StoredTensor) -> bool:
        """Whether files may have the tensor in its type: any float, or the type that the model has."""
        own = self.tensors.get(tensor.name)
        return tensor.dtype in FLOATS or (own is not None and own[1].dtype == tensor.dtype)

    def has(self, place: Located) -> bool:
        """Whether the tensor is the model's own, unchanged. Raises OSError."""
        own = self.tensors.get(place[1].name)
        return own is not None and same_bytes(own, place)


def read_manifest(text: bytes, version: int) -> Manifest:
    """Decode a manifest and check its entries, before any of its files is fetched. Raises BrokenWeights."""
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError as error:
        raise BrokenWeights(f"is not a manifest: {error}", file=MANIFEST) from error
    if manifest.version != version:
        raise BrokenWeights(f"is of version {manifest.version}, not {version}", file=MANIFEST)
    names = [file.name for file in manifest.files]
    for name in names:
        if not FILE_NAME.fullmatch(name) or name in RESERVED or Path(name).suffix in CODE_SUFFIXES:
            raise BrokenWeights(f"names {name!r}, which no policy may contain", file=MANIFEST)
    if len(set(names)) != len(names):
        raise BrokenWeights("names a file twice", file=MANIFEST)
    _check_changes(manifest.delta.files if manifest.delta else [], set(names))
    if not any(name.endswith(WEIGHTS_SUFFIX) for name in names):
        raise BrokenWeights(f"names no {WEIGHTS_SUFFIX} file", file=MANIFEST)
    return manifest


def _check_changes(changes: Sequence[DeltaFile], names: Set[str]) -> None:
    for file in changes:
        if not FILE_NAME.fullmatch(file.name) or not file.name.endswith(DELTA_SUFFIX) or file.name in names:
            raise BrokenWeights(f"names {file.name!r}, which is no file of changes", file=MANIFEST)
        if file.target not in names or not file.target.endswith(WEIGHTS_SUFFIX):
            raise BrokenWeights(f"has changes of {file.target!r}, which it does not name", file=MANIFEST)
    if len({file.name for file in changes} | {file.target for file in changes}) < 2 * len(changes):
        raise BrokenWeights("names a file of changes twice", file=MANIFEST)


def verify_directory(
    directory: Path,
    manifest: Manifest,
    expected: ExpectedModel,
    checked: Mapping[str, CheckedFile] | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Raises BrokenWeights unless the files in `directory` fit the manifest and the engine's model, and hold
    finite numbers only. Files that were `checked` while they arrived are not read again. Raises CheckEnded
    once `ended` returns True."""
    known = checked or {}
    unread = [spec for spec in manifest.files if spec.name not in known]
    with ThreadPoolExecutor(min(len(unread), THREADS) or 1) as threads:
        read = list(threads.map(lambda spec: check_path(directory / spec.name, spec, ended), unread))
    by_name = {**known, **{file.name: file for file in read}}
    weights = [spec for spec in manifest.files if spec.name.endswith(WEIGHTS_SUFFIX)]
    headers = {spec.name: by_name[spec.name].tensors for spec in weights}
    for spec in weights:
        _verify_against_manifest(spec, headers[spec.name])
    if manifest.is_adapter:
        _verify_adapter(directory, headers, expected)
    else:
        _verify_against_model(headers, expected)
        _verify_index(directory, headers)
        _verify_config(directory, expected)
    for spec in weights:
        for name in by_name[spec.name].infinities:
            if not expected.has((directory / spec.name, headers[spec.name][name])):
                raise BrokenWeights("holds infinity or NaN", file=spec.name, tensor=name)


def verify_tensors(manifest: Manifest, expected: ExpectedModel) -> None:
    """Raises BrokenWeights unless the tensors that the manifest names fit the engine's model."""
    headers = {
        spec.name: {
            each.name: StoredTensor(each.name, each.dtype, tuple(each.shape), 0, 0) for each in spec.tensors
        }
        for spec in manifest.files
    }
    _verify_against_model(headers, expected)


def _verify_against_manifest(spec: FileSpec, header: Mapping[str, StoredTensor]) -> None:
    declared = {tensor.name: tensor for tensor in spec.tensors}
    for name in sorted(declared.keys() ^ header.keys()):
        reason = "is missing in the file" if name in declared else "is not in the manifest"
        raise BrokenWeights(reason, file=spec.name, tensor=name)
    for name, tensor in header.items():
        said = declared[name]
        if list(tensor.shape) != said.shape or tensor.dtype != said.dtype:
            raise BrokenWeights(
                f"is {tensor.dtype}{list(tensor.shape)}, the manifest says {said.dtype}{said.shape}",
                file=spec.name,
                tensor=name,
            )


def _verify_adapter(
    directory: Path, headers: Mapping[str, Mapping[str, StoredTensor]], expected: ExpectedModel
) -> None:
    if expected.lora is None:
        raise BrokenWeights("is a LoRA adapter, and rollout_server.lora is not set", file=ADAPTER_CONFIG)
    if set(headers) != {ADAPTER_WEIGHTS}:
        raise BrokenWeights(f"an adapter has one file of weights, {ADAPTER_WEIGHTS}", file=MANIFEST)
    config = json_object(directory / ADAPTER_CONFIG)
    check_adapter(config, headers[ADAPTER_WEIGHTS], expected.shapes, expected.lora)


def _verify_against_model(headers: Mapping[str, Mapping[str, StoredTensor]], expected: ExpectedModel) -> None:
    found: dict[str, str] = {}
    known = expected.shapes
    for file, header in headers.items():
        for name, tensor in header.items():
            if name in found:
                raise BrokenWeights(f"is also in {found[name]}", file=file, tensor=name)
            if name not in known:
                raise BrokenWeights("is not in the engine's model", file=file, tensor=name)
            if tensor.shape != known[name]:
                raise BrokenWeights(
                    f"has shape {list(tensor.shape)}, the engine's model {list(known[name])}",
                    file=file,
                    tensor=name,
                )
            if not expected.takes(tensor):
                reason = f"dtype {tensor.dtype} is not one of {', '.join(FLOATS)}"
                raise BrokenWeights(reason, file=file, tensor=name)
            found[name] = file
    for name in sorted(known.keys() - found.keys() - expected.optional.keys()):
        raise BrokenWeights("is missing", tensor=name)


def _verify_index(directory: Path, headers: Mapping[str, Mapping[str, StoredTensor]]) -> None:
    # SGLang reads only the files that an index names: a tensor left out there is silently not loaded.
    if not (directory / INDEX).exists():
        return
    indexed = json_object(directory / INDEX).get("weight_map")
    actual = {name: file for file, header in headers.items() for name in header}
    if indexed != actual:
        raise BrokenWeights("does not name each tensor's own file", file=INDEX)


def _verify_config(directory: Path, expected: ExpectedModel) -> None:
    if not (directory / CONFIG).exists():
        return
    config = json_object(directory / CONFIG)
    for key in SHAPING_KEYS:
        ours, theirs = expected.config.get(key), config.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            raise BrokenWeights(f"{key} is {theirs!r}, the engine's {ours!r}", file=CONFIG)
