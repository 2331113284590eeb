"""`weir backup`: copies Redis, the trainer's checkpoint and the policies at one point, while everything runs.

The order, by promise 3 (no token is trained twice, and none is lost):

Let T be the moment that the copy of Redis shows, and C the checkpoint that CURRENT named at T. The backup is
the pair (Redis at T, C): what a power cut at T would leave on the disks. The trainer is built to go on from
that:

- It acknowledges an entry only after a checkpoint contains its step. So what was acknowledged at T is in C,
  and nothing that Redis no longer offers is missing from the weights.
- It begins a checkpoint only after it has acknowledged what the former one contains. So what C contains and
  Redis at T still offers is in the list of owed entries in C, which a restart acknowledges and does not
  train.

Any other pair breaks one of these. Redis at T with an *older* checkpoint: entries are acknowledged that its
weights lack (tokens are lost). Redis at T with a *newer* one: entries of steps before it are still offered,
and not in its list (tokens are trained twice). So neither "checkpoint first" nor "Redis first" is right;
`point.py` says how the checkpoint at T is found, and a copy is repeated if one was finished just then.

Versions' files never change. All are held before T, and again afterwards, so those that Redis names at T are
there.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from redis import Redis
from redis.exceptions import RedisError

from rollout_queue import clock
from rollout_queue.contract.published_policy import STABLE, PolicyRecord, PublishedAdapter
from rollout_queue.contract.serving_plan import plan_of
from rollout_queue.http.callers import bearer
from rollout_queue.http.probe_routes import release
from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import open_redis
from trainer_service.storage.checkpoint import LEDGER, STATE
from trainer_service.storage.policy_store import VERSION_DIRECTORY
from weir.audit.audit_sources import Sources
from weir.backup.manifest import BackedUpFile, BackupManifest, copy_file, noted, write_manifest
from weir.backup.point import CheckpointWatch, FileHolder, PointMissed
from weir.backup.redis_copy import INDEX, VALUES, CopiedRedis, copy_redis, single_redis
from weir.errors import StackError
from weir.words import size


def needed_versions(redis: Redis) -> frozenset[int]:
    """The versions that the fleet serves or is to serve, all newer ones, and the newest."""
    records: Any = redis.hvals(key_names.POLICIES)
    registered = {msgspec.json.decode(each, type=PolicyRecord).version for each in records}
    packed: Any = redis.get(key_names.SERVING)
    needed = plan_of(packed).needed | ({max(registered)} if registered else set())
    oldest = min(needed, default=0)
    return needed | {version for version in registered if version >= oldest}


def needed_adapters(redis: Redis, directory: Path) -> set[str]:
    """The folders in `directory` that hold adapters which calls may name."""
    records: Any = redis.hvals(key_names.ADAPTERS)
    root, found = directory.resolve().as_uri() + "/", set()
    for each in records:
        location = msgspec.json.decode(each, type=PublishedAdapter).location
        if location.startswith(root):
            found.add(location.removeprefix(root).strip("/"))
    return found


def hold_versions(holder: FileHolder, directory: Path, also: Iterable[str] = ()) -> None:
    """Hold all complete versions in the directory, and these folders, as far as they are not held yet."""
    if not directory.is_dir():
        return
    holder.path.mkdir(exist_ok=True)
    names = [path.name for path in directory.iterdir() if VERSION_DIRECTORY.fullmatch(path.name)]
    for name in (*names, *also):
        if not (holder.path / name).exists() and (directory / name / STABLE).exists():
            try:
                (holder.path / name).parent.mkdir(parents=True, exist_ok=True)
                holder.hold(name, holder.path)
            except OSError:  # removed just now
                shutil.rmtree(holder.path / name, ignore_errors=True)


def folder_of(version: int) -> str:
    return f"v{version:08d}"


TRIES = 5
FRESH_TIMEOUT_S = 90.0
"""Longer than the trainer itself waits for a checkpoint before it answers with 504."""
SPARE_BYTES = 64 * 2**20

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BackupPlan:
    """What is backed up, and where it is."""

    sources: Sources
    checkpoint_dir: Path
    policies_dir: Path | None
    every_version: bool = False
    """Whether all versions on the disk are copied, and not only those that are needed."""
    fresh: bool = False
    """Whether the trainer is asked for a checkpoint first."""


class _Position(msgspec.Struct, frozen=True):
    step: int
    version: int
    ledger_bytes: int


def back_up(plan: BackupPlan, directory: Path, say: Say) -> BackupManifest:
    """Write a backup into `directory`, a new or an empty one. Raises StackError; then nothing is left."""
    if directory.exists() and any(directory.iterdir()):
        raise StackError(f"{directory} is not empty: name a new directory")
    if not plan.checkpoint_dir.is_dir():
        raise StackError(
            f"{plan.checkpoint_dir} is not here: run this where the trainer's checkpoints are, or name them "
            "by --checkpoint-dir"
        )
    existed = directory.exists()
    mask = os.umask(0o077)  # only the owner may read what is written from here on
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    try:
        if plan.fresh:
            _ask_for_checkpoint(plan.sources, say)
        return _repeated(plan, directory, say)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        if existed:
            directory.mkdir()
        raise
    finally:
        os.umask(mask)


def _repeated(plan: BackupPlan, directory: Path, say: Say) -> BackupManifest:
    for left in reversed(range(TRIES)):
        try:
            return _attempt(plan, directory, say)
        except PointMissed as missed:
            if not left:
                raise
            say(f"{missed}; it is copied again")
        except RedisError as error:
            raise StackError(f"Redis at {plan.sources.redis_address}: {error}") from error
        except OSError as error:
            raise StackError(f"the backup was not written: {error}") from error
    raise AssertionError  # the last attempt returns or raises


def _attempt(plan: BackupPlan, directory: Path, say: Say) -> BackupManifest:
    """One copy. Raises PointMissed if a checkpoint was finished just when Redis forked."""
    policies = FileHolder(plan.policies_dir) if plan.policies_dir is not None else None
    with open_redis(single_redis(plan.sources.redis_url), timeout_s=30) as redis:
        _check_room(redis, directory)
        watch = CheckpointWatch(redis, plan.checkpoint_dir)
        try:
            needed, folders = set(needed_versions(redis)), set[str]()
            if policies is not None and plan.policies_dir is not None:
                folders = needed_adapters(redis, plan.policies_dir)
                hold_versions(policies, plan.policies_dir, folders)
            watch.start()
            taken_at = clock.now()
            copied = copy_redis(plan.sources.redis_url, directory, watch.look_twice)
            checkpoint = watch.checkpoint_at(copied.mark)
            say(f"Redis: {copied.keys} keys, {size((directory / VALUES).stat().st_size)}")
            needed |= needed_versions(redis)
            if policies is not None and plan.policies_dir is not None:
                folders |= needed_adapters(redis, plan.policies_dir)
                hold_versions(policies, plan.policies_dir, folders)
            return _written(plan, directory, copied, checkpoint, policies, needed, folders, taken_at, say)
        finally:
            watch.release()
            if policies is not None:
                policies.release()


def _written(
    plan: BackupPlan,
    directory: Path,
    copied: CopiedRedis,
    checkpoint: Path | None,
    policies: FileHolder | None,
    needed: set[int],
    folders: set[str],
    taken_at: float,
    say: Say,
) -> BackupManifest:
    files = {name: noted(directory / name) for name in (VALUES, INDEX)}
    position = None
    if checkpoint is not None:
        position, more = _copy_checkpoint(checkpoint, directory)
        files |= more
        say(f"checkpoint {checkpoint.name}: step {position.step}, version {position.version}")
    else:
        say("the trainer has made no checkpoint yet")
    versions: list[int] = []
    if policies is not None and policies.path.is_dir():
        held = {path.name for path in policies.path.iterdir()}
        wanted = {folder_of(version) for version in needed} if not plan.every_version else held
        files |= _copy_tree(policies.path, directory / "policies", sorted((wanted & held) | folders))
        versions = [int(name[1:]) for name in sorted(wanted & held) if name[1:].isdigit()]
        say(f"policies: {', '.join(map(str, versions)) or 'none'}")
    manifest = BackupManifest(
        taken_at=taken_at,
        release=release(),
        redis_version=copied.server,
        keys=copied.keys,
        checkpoint=checkpoint.name if checkpoint is not None else None,
        step=position.step if position is not None else None,
        version=position.version if position is not None else None,
        policies=tuple(versions),
        policies_dir=str(plan.policies_dir.absolute()) if plan.policies_dir is not None else "",
        files=files,
    )
    write_manifest(directory, manifest)
    return manifest


def _copy_checkpoint(held: Path, directory: Path) -> tuple[_Position, dict[str, BackedUpFile]]:
    """Copy the checkpoint, the part of the ledger that belongs to it, and what lies beside."""
    tag = held.name
    position = msgspec.json.decode((held / tag / STATE).read_bytes(), type=_Position)
    target, files = directory / "checkpoints", dict[str, BackedUpFile]()
    for path in sorted(held.rglob("*")):
        if path.is_file():
            name = path.relative_to(held)
            most = position.ledger_bytes if name.as_posix() == LEDGER else None
            files[f"checkpoints/{name.as_posix()}"] = copy_file(path, target / name, most)
    return position, files


def _copy_tree(source: Path, target: Path, names: list[str]) -> dict[str, BackedUpFile]:
    files = dict[str, BackedUpFile]()
    for path in (path for name in names for path in sorted((source / name).rglob("*"))):
        if path.is_file():
            name = path.relative_to(source)
            files[f"{target.name}/{name.as_posix()}"] = copy_file(path, target / name)
    return files


def _check_room(redis: Redis, directory: Path) -> None:
    """Raises StackError if the disk has no room for the data of Redis, which are smaller on disk."""
    memory: Any = redis.info("memory")
    used, free = int(memory["used_memory"]), shutil.disk_usage(directory).free
    if free < used + SPARE_BYTES:
        raise StackError(f"the disk of {directory} has {size(free)} left, and Redis holds {size(used)}")


def _ask_for_checkpoint(sources: Sources, say: Say) -> None:
    """Have the trainer write a checkpoint; without an answer, the last one is taken."""
    headers = bearer(sources.admin_key)
    began_at = clock.monotonic()
    try:
        answer = httpx.post(f"{sources.trainer_url}/checkpoint", headers=headers, timeout=FRESH_TIMEOUT_S)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        say(f"the trainer wrote no checkpoint ({error}); the last one is taken")
    else:
        say(f"the trainer wrote a checkpoint in {clock.monotonic() - began_at:.1f} s")
