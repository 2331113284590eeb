"""The published versions in a backup: which ones, and how their files get into it."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis

from rollout_queue.contract.policies.adapter import PublishedAdapter
from rollout_queue.contract.policies.policy import STABLE, PolicyRecord
from rollout_queue.contract.policies.serving import plan_of
from rollout_queue.redis import keys
from trainer_service.storage.policy_store import VERSION_DIRECTORY
from weir.backup.point import FileHolder


def needed_versions(redis: Redis) -> frozenset[int]:
    """The versions that the fleet serves or is to serve, all newer ones, and the newest."""
    records: Any = redis.hvals(keys.POLICIES)
    registered = {msgspec.json.decode(each, type=PolicyRecord).version for each in records}
    packed: Any = redis.get(keys.SERVING)
    needed = plan_of(packed).needed | ({max(registered)} if registered else set())
    oldest = min(needed, default=0)
    return needed | {version for version in registered if version >= oldest}


def needed_adapters(redis: Redis, directory: Path) -> set[str]:
    """The folders in `directory` that hold adapters which calls may name."""
    records: Any = redis.hvals(keys.ADAPTERS)
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
