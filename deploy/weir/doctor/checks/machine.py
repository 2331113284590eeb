"""Checks of this machine: room on disks and in memory, paths, models, logs and processes."""

from pathlib import Path

from weir.doctor.facts import DeploymentFacts, DiskFacts
from weir.doctor.problem import Found
from weir.words import counted, size

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
