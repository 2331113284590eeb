"""`weir export-model`: copies one published version to a directory of its own, whole or not at all.

{policies_dir}/v00000012/ ─ each file, checked by its digest ─▶ DIR.part/ ─ sync ─ rename ─▶ DIR/
"""

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollout_queue.contract.policies.policy import MANIFEST, STABLE, FileSpec, Manifest
from weir.errors import StackError
from weir.words import size

VERSION_DIRECTORY = re.compile(r"v(\d{8,})")
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class ExportedModel:
    """What was copied."""

    version: int
    step: int
    directory: Path
    size_bytes: int
    is_adapter: bool

    @property
    def sentence(self) -> str:
        """What is there now, and how to load it."""
        what = f"{self.directory} is version {self.version} (step {self.step}), {size(self.size_bytes)}"
        if self.is_adapter:
            return (
                f"{what}: a LoRA adapter, whose adapter_config.json names its base model; load it with "
                f"peft.AutoPeftModelForCausalLM.from_pretrained({str(self.directory)!r})"
            )
        return (
            f"{what}: a whole model, with all that was learned merged into its weights; load it with "
            f"transformers.AutoModelForCausalLM.from_pretrained({str(self.directory)!r})"
        )


def versions_in(policies_dir: Path) -> list[int]:
    """Every complete version, ascending. The trainer may write and remove some meanwhile."""
    if not policies_dir.is_dir():
        return []
    named = ((VERSION_DIRECTORY.fullmatch(each.name), each) for each in policies_dir.iterdir())
    return sorted(int(match[1]) for match, each in named if match and (each / STABLE).exists())


def export(policies_dir: Path, version: int, target: Path) -> ExportedModel:
    """Copy a version into `target`, which is new or empty. Raises StackError, and then leaves nothing."""
    source = policies_dir / f"v{version:08d}"
    refuse_used(target)
    place = target.absolute()
    draft = place.with_name(f".{place.name}.part-{os.getpid()}")
    try:
        manifest = msgspec.json.decode((source / MANIFEST).read_bytes(), type=Manifest)
        draft.mkdir(parents=True)
        for spec in manifest.files:
            _copy(source / spec.name, draft / spec.name, spec)
        _sync(draft)
        if place.is_dir():
            place.rmdir()  # it is empty
        draft.rename(place)
    except (OSError, msgspec.DecodeError) as error:
        raise StackError(f"version {version} could not be copied to {target}: {_why(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    whole = sum(spec.size for spec in manifest.files)
    return ExportedModel(version, manifest.step, target, whole, manifest.is_adapter)


def refuse_used(target: Path) -> None:
    """Raises StackError if something is there already."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StackError(f"{target} is not empty: name a new directory")


def chosen(policies_dir: Path, wanted: int | None, served: int | None) -> int:
    """The version to copy: the one that is wanted, else the one that answers calls, else the newest. Raises
    StackError if there is none."""
    there = versions_in(policies_dir)
    if not policies_dir.is_dir():
        raise StackError(
            f"there are no versions in {policies_dir}, which does not exist: name the directory of a run "
            "(--run-dir), or that of its versions (--policies-dir)"
        )
    if not there:
        raise StackError(
            f"{policies_dir} has no version yet: the trainer publishes the first one after its first step "
            "(`weir top` says what it waits for)"
        )
    version = wanted if wanted is not None else served if served in there else there[-1]
    if version not in there:
        raise StackError(
            f"{policies_dir} has no version {version}: it has {', '.join(map(str, there))} "
            "(trainer.keep_policies says how many are kept)"
        )
    return version


def _copy(source: Path, target: Path, spec: FileSpec) -> None:
    """Copy one file, and check it. Raises StackError and OSError."""
    digest = hashlib.sha256()
    with source.open("rb") as read, target.open("wb") as written:
        while piece := read.read(PIECE_BYTES):
            digest.update(piece)
            written.write(piece)
        written.flush()
        os.fsync(written.fileno())
    if digest.hexdigest() != spec.sha256:
        raise StackError(f"{source} is not what was published, by its digest: export another version")


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _why(error: Exception) -> str:
    return str(error.strerror or error) if isinstance(error, OSError) else f"its manifest: {error}"
