"""Examines this machine: disks, memory, the models' files, the logs and processes of `weir up`."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rollout_queue import clock
from rollout_queue.contract.policies.policy import sha256_of
from rollout_queue.machine_memory import machine_memory
from weir.doctor.facts import DiskFacts, LogFacts, MachineFacts
from weir.doctor.targets import Targets

SAME_FILES = ("config.json", "tokenizer.json")
"""The files beside the weights on which gateway, engine and trainer must agree."""
PLACES = (
    ("trainer", "checkpoint_dir"),
    ("trainer", "policies_dir"),
    ("rollout_server", "policies_dir"),
    ("rollout_server", "weights_dir"),
)
MODELS = ("gateway", "rollout_server", "trainer")
LOG_TAIL_BYTES = 256 * 1024
ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|^[A-Za-z_.]*(Error|Exception): ")
READY_LINE = re.compile(
    r"probes: ready again|: Application startup complete|trainer_service: listens on|: engine serves version"
    r"|ready to roll!$|Ready to accept connections"
)
"""What a service, its engine or Redis writes once it can work: what was wrong before is over."""
WRITTEN_AT = re.compile(r"^\W?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
RECENT_S = 3600.0
"""An older error is no news."""


def examine(targets: Targets) -> MachineFacts:
    """Raises OSError if something here cannot be read."""
    memory = machine_memory()
    stack = targets.stack
    return MachineFacts(
        disks=tuple(_disks(targets)),
        memory_bytes=memory.total,
        memory_free_bytes=memory.free,
        models=_models(targets),
        errors=tuple(_errors(targets)),
        ended=() if stack is None else tuple(set(stack.services) - set(stack.running())),
        parent_ended=stack is not None and stack.parent.process() is None,
        restarts={}
        if stack is None
        else {name: each.restarts for name, each in stack.services.items() if each.restarts},
    )


def _disks(targets: Targets) -> Iterator[DiskFacts]:
    for section, name in PLACES:
        given = targets.settings.get(section, {}).get(name)
        if not given:
            continue
        path = Path(str(given))
        if not path.is_dir():
            yield DiskFacts(setting=f"{section}.{name}", path=str(path), exists=False)
            continue
        sizes = [_size(part) for part in path.iterdir() if part.is_dir()]
        yield DiskFacts(
            setting=f"{section}.{name}",
            path=str(path),
            exists=True,
            free_bytes=shutil.disk_usage(path).free,
            largest_part_bytes=max(sizes, default=0),
            parts=len(sizes),
        )


def _size(directory: Path) -> int:
    """The bytes below a directory, from which the trainer may be removing files."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _models(targets: Targets) -> Mapping[str, Mapping[str, str]]:
    found: dict[str, Mapping[str, str]] = {}
    for section in MODELS:
        given = targets.settings.get(section, {}).get("model_path")
        if given and Path(str(given)).is_dir():
            files = [Path(str(given)) / name for name in SAME_FILES]
            found[section] = {file.name: sha256_of(file) for file in files if file.is_file()}
    return found


def _errors(targets: Targets) -> Iterator[LogFacts]:
    """The last error in each log of the run directory, if it is recent."""
    if targets.run_dir is None:
        return
    for path in sorted((targets.run_dir / "logs").glob("*.log")):
        found = _last_error(path)
        if found is not None and clock.now() - found[1] < RECENT_S:
            yield LogFacts(service=path.stem, path=str(path), line=found[0])


def _last_error(path: Path) -> tuple[str, float] | None:
    """The last line that tells an error, and when it was written; None without one since the service was
    ready."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        lines = log.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()
    written_at, found = None, None
    for line in lines:
        if said := WRITTEN_AT.match(line):
            with suppress(ValueError):
                written_at = datetime.strptime(said[1], "%Y-%m-%d %H:%M:%S").timestamp()
        if READY_LINE.search(line):
            found = None
        elif ERROR_LINE.search(line):
            found = line[:300], written_at or path.stat().st_mtime
    return found
