"""Files of models: a model of the hub becomes a directory here, and a version that was trained is exported.

OWNER/NAME on the Hugging Face hub ─ downloaded once ─▶ models_dir
{policies_dir}/v00000012/ ─ each file, checked by its digest ─▶ DIR.part/ ─ sync ─ rename ─▶ DIR/

`weir export-model` copies one published version, whole or not at all.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollout_queue.contract.published_policy import MANIFEST, STABLE, FileSpec, Manifest
from rollout_queue.protocol.message import MalformedMessage
from weir.errors import StackError
from weir.stack import stack_state
from weir.stack.service_process import system_status
from weir.stack.settings import StackSettings
from weir.words import size

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken"]
"""What Weir reads. Nothing that could be executed is fetched."""


def on_this_machine(path: Path, models_dir: Path, say: Callable[[str], None]) -> Path:
    """The directory of the model: `path`, or where the model of this name on the hub is now. Raises
    StackError."""
    name = str(path)
    if path.exists() or not HUB_NAME.fullmatch(name):
        return path
    out = models_dir / name.replace("/", "--")
    if not (out / "config.json").is_file():
        say(f"{name} is no directory here: downloading the model of this name from the Hugging Face hub")
        draft = out.with_name(f"{out.name}.part")
        _download(name, draft)
        if not (draft / "config.json").is_file():
            raise StackError(f"{name} on the Hugging Face hub is no model: it has no config.json")
        draft.rename(out)  # only a whole model has this name
    say(f"the model {name} is in {out}")
    return out


def _download(name: str, draft: Path) -> None:
    """Fetch the files; what an earlier attempt has fetched is not fetched again. Raises StackError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise StackError(_by_hand(name, "huggingface_hub is not installed here")) from None
    try:
        endpoint = os.environ.get("HF_ENDPOINT")
        snapshot_download(name, local_dir=draft, allow_patterns=PATTERNS, endpoint=endpoint)
    except Exception as error:  # also those of the HTTP library that it uses, which may be another one
        why = next(filter(None, str(error).splitlines()), type(error).__name__).partition(". ")[0]
        raise StackError(_by_hand(name, why)) from error


def _by_hand(name: str, why: str) -> str:
    return (
        f"{name} is not a Hugging Face directory on this machine, and the model of this name could not be "
        f"downloaded from the hub: {why.rstrip('.')}. Where the hub can be reached, `hf download {name} "
        "--local-dir DIR` fetches it; then set WEIR_MODEL_PATH to DIR"
    )


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


def served_version(settings: StackSettings) -> int | None:
    """None if no gateway runs in the run directory, or if it does not answer."""
    found = stack_state.read(settings.run_dir)
    if found is None or found.gateway_url is None:
        return None
    try:
        return system_status(found.gateway_url, next(iter(settings.admin_keys), None)).policy.serving
    except (OSError, MalformedMessage):
        return None
