"""Makes a version of a directory that another trainer has written, with its weights but without a manifest.

step_12/ with model.safetensors, config.json, STABLE ─▶ manifest.json beside them ─▶ a published version
"""

import logging
import re
from pathlib import Path

import msgspec

from rollout_queue.contract.ids import new_id
from rollout_queue.contract.published_policy import (
    MANIFEST,
    STABLE,
    FileSpec,
    Manifest,
    TensorSpec,
    sha256_of,
)
from rollout_server.weights.file_check import WEIGHTS_SUFFIX
from rollout_server.weights.locations import FileLocation
from rollout_server.weights.safetensors_file import BrokenWeights, read_header
from rollout_server.weights.store import manifest_digest
from rollout_server.weights.verify import FILE_NAME, read_manifest

logger = logging.getLogger(__name__)

NUMBERED = re.compile(r"step_(\d{1,15})")
"""How prime-rl names the directory of a step."""
SUFFIXES = (WEIGHTS_SUFFIX, ".json")
"""The files that belong to a version. The engine has the tokenizer of the model that it started with."""


def number_of(directory: Path) -> int | None:
    """The number in the directory's name; None if it has none."""
    named = NUMBERED.fullmatch(directory.name)
    return int(named[1]) if named else None


def with_manifest(place: FileLocation, version: int) -> str:
    """Write the manifest, unless the directory has one of this version; return its SHA-256.

    Several servers may do so at once: each writes the same bytes, and a file appears whole. Raises
    BrokenWeights, LocationRefused, OSError.
    """
    if not place.resolve(STABLE).is_file():
        raise BrokenWeights(f"has no {STABLE} file, so it may not be complete")
    path = place.resolve(MANIFEST)
    if path.is_file():
        text = path.read_bytes()
        read_manifest(text, version)
        return manifest_digest(text)
    names = sorted(each.name for each in place.directory.iterdir() if each.name.endswith(SUFFIXES))
    files = [_spec(place.resolve(name), name) for name in names if FILE_NAME.fullmatch(name)]
    text = msgspec.json.encode(Manifest(version=version, step=version, files=files))
    read_manifest(text, version)
    draft = path.with_name(f".{MANIFEST}.{new_id()}")
    draft.write_bytes(text)
    draft.replace(path)
    logger.info("wrote the manifest of version %d into %s", version, place.directory)
    return manifest_digest(text)


def _spec(path: Path, name: str) -> FileSpec:
    tensors = read_header(path).values() if name.endswith(WEIGHTS_SUFFIX) else ()
    specs = [TensorSpec(each.name, list(each.shape), each.dtype) for each in tensors]
    return FileSpec(name, path.stat().st_size, sha256_of(path), specs)
