"""This machine, examined and checked: room on disks and in memory, paths, models, and the logs and processes
of `weir up`.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rollout_queue import clock
from rollout_queue.contract.published_policy import sha256_of
from rollout_queue.machine_memory import machine_memory
from rollout_queue.protocol.conditions import counted
from weir.doctor.deployment_facts import DeploymentFacts, DiskFacts, Found, LogFacts, MachineFacts
from weir.doctor.targets import Targets
from weir.words import size

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
    r"probe(s|_routes): ready again|: Application startup complete|trainer_service: listens on"
    r"|: engine serves version|ready to roll!$|Ready to accept connections"
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


MORE_PARTS = 2
"""A checkpoint is written before an older one is removed, and so is a version."""
LEAST_FREE_BYTES = 2**30
LEAST_FREE_SHARE = 0.05


def not_examined(facts: DeploymentFacts) -> Found:
    if facts.machine.failed is not None:
        yield (
            "error",
            f"this machine could not be examined: {facts.machine.failed}",
            "look for a disk that hangs (`df`, `dmesg`)",
        )


def disk_short(facts: DeploymentFacts) -> Found:
    for disk in facts.machine.disks:
        needed = max(LEAST_FREE_BYTES, MORE_PARTS * disk.largest_part_bytes)
        if disk.exists and disk.free_bytes < needed:
            yield (
                "error" if disk.free_bytes < disk.largest_part_bytes else "warning",
                f"the disk of {disk.setting} ({disk.path}) has {size(disk.free_bytes)} left, and should have "
                f"{size(needed)}" + _for_what(disk),
                "free some space, or lower trainer.keep_checkpoints and trainer.keep_policies",
            )


def _for_what(disk: DiskFacts) -> str:
    if MORE_PARTS * disk.largest_part_bytes <= LEAST_FREE_BYTES:
        return ""
    return f": room for {MORE_PARTS} more of {size(disk.largest_part_bytes)}"


def policies_not_shared(facts: DeploymentFacts) -> Found:
    """Where versions travel by a shared disk, trainer and rollout servers must mean the same directory."""
    writes, reads = facts.setting("trainer", "policies_dir"), facts.setting("rollout_server", "policies_dir")
    if not writes or not reads or facts.setting("trainer", "publish_url"):
        return
    if Path(str(writes)).resolve() != Path(str(reads)).resolve():
        yield (
            "error",
            f"the trainer writes versions into {writes}, and rollout servers accept only those in {reads}",
            "set both policies_dir to one directory, or trainer.publish_url to an address",
        )


def policies_out_of_sight(facts: DeploymentFacts) -> Found:
    """A directory that the settings name, and that is not there although the trainer has published."""
    for disk in facts.machine.disks:
        if disk.setting == "rollout_server.policies_dir" and not disk.exists and facts.redis.policies > 1:
            if facts.setting("trainer", "publish_url"):
                continue
            yield (
                "error",
                f"versions are published, and {disk.path} ({disk.setting}) is not there",
                "mount the trainer's directory, or set trainer.publish_url",
            )


def memory_short(facts: DeploymentFacts) -> Found:
    most, free = facts.machine.memory_bytes, facts.machine.memory_free_bytes
    if most and free < LEAST_FREE_SHARE * most:
        yield (
            "warning",
            f"{size(free)} of {size(most)} of memory are left, so the system may kill a service",
            "stop what is not needed, or raise the container's limit",
        )


def redis_larger_than_memory(facts: DeploymentFacts) -> Found:
    local = any(host in facts.redis.address for host in ("//127.0.0.1", "//localhost"))
    most = int(facts.redis.info.get("maxmemory", 0))
    if local and facts.machine.memory_bytes and most > 0.75 * facts.machine.memory_bytes:
        yield (
            "warning",
            f"Redis may use {size(most)}, and this machine has {size(facts.machine.memory_bytes)}: "
            "rewriting its file needs room as well",
            "lower maxmemory (WEIR_REDIS_MEMORY)",
        )


def models_differ(facts: DeploymentFacts) -> Found:
    told = {f"{section}.model_path": files for section, files in facts.machine.models.items()}
    if facts.manifest is not None and not facts.manifest.is_adapter:
        named = f"published version {facts.manifest.version}"
        told[named] = {file.name: file.sha256 for file in facts.manifest.files}
    for name in ("config.json", "tokenizer.json"):
        digests = {who: files[name] for who, files in told.items() if name in files}
        if len(set(digests.values())) > 1:
            yield (
                "error",
                f"{name} differs between {', '.join(sorted(digests))}, so one of them has another model",
                "set WEIR_MODEL_PATH for all services to one directory",
            )


def log_has_error(facts: DeploymentFacts) -> Found:
    for log in facts.machine.errors:
        yield "warning", f"the last error of {log.service}: {log.line.strip()}", f"read {log.path}"


def process_ended(facts: DeploymentFacts) -> Found:
    for name in facts.machine.ended:
        yield (
            "error",
            f"the process of {name} has ended",
            "`weir up` starts it again, its log says why it ended",
        )
    if facts.machine.parent_ended:
        yield (
            "error",
            "the process that restarts services has ended",
            "`weir down`, then `weir up`",
        )
    for name, times in facts.machine.restarts.items():
        yield "warning", f"{name} was restarted {counted(times, 'time')}", "its log says why it ended"


CHECKS = (
    not_examined,
    disk_short,
    policies_not_shared,
    policies_out_of_sight,
    memory_short,
    redis_larger_than_memory,
    models_differ,
    log_has_error,
    process_ended,
)
