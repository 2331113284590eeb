"""`weir restore`: writes a backup into an empty place.

verify every file ─▶ is the target empty? ─▶ versions, checkpoint ─▶ keys of Redis ─▶ CURRENT, schema

Until the end, `weir:schema` says that a restore goes on, so no service starts on half of the data.

Of the keys these are left out: who is registered and who has which lease, since the former servers and
trainer may still run. Changed: where versions lie, and when sessions expire, which gets later by the time
that has passed since the backup.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from rollout_queue import clock
from rollout_queue.contract.published_policy import STABLE
from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import open_redis
from rollout_queue.redis.schema_version import RESTORING, write_schema
from trainer_service.storage.checkpoint import CURRENT, TAG
from trainer_service.storage.durable_files import sync_directory, write_atomically
from trainer_service.storage.policy_store import ASIDE, VERSION_DIRECTORY
from weir.backup.backup import Say
from weir.backup.manifest import BackupBroken, BackupManifest, copy_file, files_below, read_manifest, verify
from weir.backup.redis_copy import PREFIX, StoredKey, StoredValues, own_prefix, single_redis, stored_keys
from weir.errors import StackError
from weir.stack.run_keys import with_keys
from weir.stack.service_process import redis_ready, redis_service
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

LEFT_OUT = frozenset(
    {
        *(
            key_names.SERVERS,
            key_names.SERVER_PUSHES,
            key_names.TRAINER,
            key_names.LEASE,
            key_names.FENCE,
            key_names.PUSH_LEASE,
        ),
        *(key_names.SCHEMA, key_names.LASTING, key_names.LOSSES),
    }
)
LATER = (key_names.DEADLINES, key_names.CLIENT_SESSIONS_LIVE)
"""Sorted sets whose scores are times at which something ends."""
LOCATED = (key_names.POLICIES, key_names.ADAPTERS, key_names.RESERVED)
"""Hashes whose values have the places of versions."""
PAGE = 1000
MOST_BYTES_AT_ONCE = 8 * 2**20
BULK_LIMIT = 512 * 2**20
"""What Redis takes in one argument, unless its settings say otherwise."""


def has_keys(redis: Redis, own: bytes) -> bool:
    """Whether there are names that begin with `own`."""
    return next(redis.scan_iter(match=own + b"*", count=PAGE), None) is not None


def clear(redis: Redis, own: bytes) -> None:
    """Remove all keys whose names begin with `own`."""
    for page in _pages(redis.scan_iter(match=own + b"*", count=PAGE)):
        redis.unlink(*page)  # bounded: PAGE


def write_keys(redis: Redis, own: bytes, directory: Any, values: StoredValues) -> int:
    """Write all keys of the backup, with names that begin with `own`. Returns how many. Raises StackError."""
    count = 0
    pending: Any = redis.pipeline(transaction=False)
    size = 0
    for key in stored_keys(directory):
        if key.name.decode(errors="replace") in LEFT_OUT:
            continue
        if key.size > BULK_LIMIT:
            _raise_limit(redis, key)
        expires = ("ABSTTL",) if key.expires_ms is not None else ()
        pending.execute_command(  # bounded: by the key that is restored
            "RESTORE",
            own + key.name.removeprefix(PREFIX),
            key.expires_ms or 0,
            values.value(key),
            "REPLACE",
            *expires,
        )
        count, size = count + 1, size + key.size
        if size > MOST_BYTES_AT_ONCE or len(pending) >= PAGE:
            _send(pending)
            size = 0
    _send(pending)
    return count


def _send(pending: Any) -> None:
    try:
        pending.execute()
    except ResponseError as error:
        if "DUMP payload" in str(error) or "Bad data format" in str(error):
            raise StackError(
                f"this Redis does not take the data: {error}; it must not be older than the one of the backup"
            ) from error
        raise StackError(f"Redis refuses the data: {error}") from error
    except RedisError as error:
        raise StackError(f"Redis failed: {error}") from error


def _raise_limit(redis: Redis, key: StoredKey) -> None:
    """Let Redis take an argument of this size."""
    try:
        redis.config_set("proto-max-bulk-len", str(key.size + 2**20))
        redis.config_set("client-query-buffer-limit", str(max(2**30, 2 * key.size)))
    except ResponseError as error:
        raise StackError(
            f"{key.name.decode(errors='replace')} has {key.size} bytes, and Redis takes {BULK_LIMIT}: raise "
            f"its proto-max-bulk-len and client-query-buffer-limit ({error})"
        ) from error


def move_locations(redis: Redis, before: str, after: str) -> int:
    """Change the places of versions in `before` to the same names in `after`; both are URLs that end with a
    slash. Returns how many were changed."""
    changed = 0
    for name in LOCATED:
        for field, value in redis.hscan_iter(name, count=PAGE):
            moved = value.replace(before.encode(), after.encode())
            if moved != value:
                redis.hset(name, field, moved)
                changed += 1
    return changed


def postpone(redis: Redis, seconds: float) -> None:
    """Let sessions expire later by what has passed since the backup."""
    for name in LATER:
        for page in _pages(redis.zscan_iter(name, count=PAGE)):
            with redis.pipeline(transaction=False) as pipeline:
                for member, _ in page:
                    pipeline.zincrby(name, seconds, member)
                pipeline.execute()


def _pages(items: Iterator[Any]) -> Iterator[list[Any]]:
    page: list[Any] = []
    for item in items:
        page.append(item)
        if len(page) == PAGE:
            yield page
            page = []
    if page:
        yield page


def check_index(directory: Any, expected: int) -> None:
    """Raises BackupBroken if the index has another number of keys than the manifest says."""
    found = sum(1 for _ in stored_keys(directory))
    if found != expected:
        raise BackupBroken(f"{directory} has {found} keys of Redis, and its manifest says {expected}")


REDIS_START_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RestoreTarget:
    """Where a backup is written."""

    redis_url: str
    checkpoint_dir: Path
    policies_dir: Path
    replace: bool = False
    """Whether what is there may be removed."""


def restore(directory: Path, target: RestoreTarget, say: Say) -> BackupManifest:
    """Write the backup. Raises BackupBroken or StackError; before the first file is written, nothing has
    changed."""
    manifest = read_manifest(directory)
    verify(directory, manifest)
    check_index(directory, manifest.keys)
    say(f"{directory} is whole: {len(manifest.files)} files, {manifest.keys} keys")
    try:
        access = single_redis(target.redis_url)
        own = own_prefix(access)
        with open_redis(access, timeout_s=600, protocol=2) as redis:
            _check_target(redis, own, target)
            if target.replace:
                _clear(redis, own, target)
            redis.set(key_names.SCHEMA, RESTORING)
            _write_policies(directory, manifest, target.policies_dir)
            _write_checkpoint(directory, manifest, target.checkpoint_dir)
            _write_redis(redis, own, directory, manifest, target, say)
            if manifest.checkpoint is not None:
                write_atomically(target.checkpoint_dir / CURRENT, manifest.checkpoint.encode())
            write_schema(redis)
    except RedisError as error:
        raise StackError(f"Redis failed: {error}; run this again with --replace") from error
    except OSError as error:
        raise StackError(f"the backup was not restored: {error}; run this again with --replace") from error
    return manifest


def _check_target(redis: Redis, own: bytes, target: RestoreTarget) -> None:
    """Raises StackError if something runs there, or if something is there that may not be removed."""
    if redis.exists(key_names.LEASE):
        raise StackError("a trainer runs on this Redis: stop all services, except Redis, first")
    if target.replace:
        return
    if has_keys(redis, own):
        raise StackError("this Redis has data of Weir: name another one, or allow its removal by --replace")
    for path in _occupying(target):
        raise StackError(f"{path} is there: name another directory, or allow its removal by --replace")


def _occupying(target: RestoreTarget) -> Iterator[Path]:
    """What a trainer has left in the directories."""
    for directory, names in ((target.checkpoint_dir, TAG), (target.policies_dir, VERSION_DIRECTORY)):
        if directory.is_dir():
            yield from (path for path in sorted(directory.iterdir()) if names.match(path.name))
    if (target.checkpoint_dir / CURRENT).exists():
        yield target.checkpoint_dir / CURRENT


def _clear(redis: Redis, own: bytes, target: RestoreTarget) -> None:
    """CURRENT goes first, so that no trainer takes what is left."""
    (target.checkpoint_dir / CURRENT).unlink(missing_ok=True)
    clear(redis, own)
    for path in list(_occupying(target)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_policies(directory: Path, manifest: BackupManifest, target: Path) -> None:
    """Write each version under another name first; STABLE comes last."""
    target.mkdir(parents=True, exist_ok=True)
    begun: set[Path] = set()
    for source, name in files_below(directory, manifest, "policies"):
        if name.name == STABLE:
            continue
        folder = name.parent
        begun.add(folder)
        copy_file(source, (target / folder).with_name(f"{folder.name}{ASIDE}") / name.name)
    for folder in sorted(begun):
        final = target / folder
        final.with_name(f"{folder.name}{ASIDE}").rename(final)
        (final / STABLE).touch()
        sync_directory(final)
        sync_directory(final.parent)


def _write_checkpoint(directory: Path, manifest: BackupManifest, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for source, name in files_below(directory, manifest, "checkpoints"):
        copy_file(source, target / name)
    for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        sync_directory(folder)


def _write_redis(
    redis: Redis, own: bytes, directory: Path, manifest: BackupManifest, target: RestoreTarget, say: Say
) -> None:
    with StoredValues(directory) as values:
        count = write_keys(redis, own, directory, values)
    say(f"Redis: {count} keys")
    if manifest.policies_dir:
        before, after = (
            _root(Path(path)) for path in (manifest.policies_dir, target.policies_dir.absolute())
        )
        moved = move_locations(redis, before, after) if before != after else 0
        if moved:
            say(f"{moved} places of versions: {before} is now {after}")
    passed_s = max(0.0, clock.now() - manifest.taken_at)
    postpone(redis, passed_s)


def _root(path: Path) -> str:
    return path.resolve().as_uri() + "/"


@contextmanager
def redis_of_run(settings: StackSettings, url: str | None) -> Iterator[str]:
    """The URL of the Redis to write to. If none is named, and none answers, that of `weir up` runs during the
    block."""
    if url is not None:
        yield url
        return
    settings = with_keys(settings)
    if redis_ready(single_redis(settings.redis_url))() is None:
        yield settings.redis_url
        return
    with Stack(settings, [redis_service(settings)]) as stack:
        stack.wait_ready(timeout_s=REDIS_START_S)
        yield stack.redis_url
