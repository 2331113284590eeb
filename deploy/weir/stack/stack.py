"""All services of this machine as one context manager: it checks, starts, watches and stops them.

with Stack(settings) as stack:
    stack.wait_ready()
    … stack.gateway_url …
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from rollout_queue import clock
from weir.errors import StackError
from weir.stack import stack_state
from weir.stack.preflight import check_machine, check_ports
from weir.stack.service_process import Service, ServiceProcess, all_children
from weir.stack.services import services_of
from weir.stack.settings import StackSettings
from weir.stack.stack_state import Phase, ProcessState, StackState

logger = logging.getLogger(__name__)

POLL_EVERY_S = 0.25
NOTE_DESCENDANTS_EVERY_S = 5.0
"""Reading the table of processes costs milliseconds, so it is read seldom, and once for all services."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], Any] | int | None


class Stack:
    """The services as children of this process. The end of the `with` always stops them."""

    def __init__(self, settings: StackSettings, services: Sequence[Service] | None = None) -> None:
        self.settings = settings
        self._given = services
        self.processes: dict[str, ServiceProcess] = {}
        self._waiting: dict[str, str] = {}
        self._handlers: dict[int, Handler] = {}
        self._note_at = 0.0

    @property
    def gateway_url(self) -> str:
        return self.processes["gateway"].service.url

    @property
    def rollout_url(self) -> str:
        return self.processes["rollout_server"].service.url

    @property
    def trainer_url(self) -> str:
        return self.processes["trainer_service"].service.url

    @property
    def redis_url(self) -> str:
        return self.processes["redis"].service.url

    def __enter__(self) -> Self:
        self._end_by_exception()
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not interrupt this and leave children running; `stop` has its own deadlines.
        self._set_handlers(dict.fromkeys((signal.SIGINT, *ENDING_SIGNALS), signal.SIG_IGN))
        try:
            self.stop()
        finally:
            self._set_handlers(self._handlers)

    def start(self) -> None:
        """Check the machine, then start all services at once; they wait for each other."""
        stack_state.refuse_in_use(self.settings.run_dir)
        stack_state.own_run_dir(self.settings.run_dir)
        if self._given is None:
            check_machine(self.settings)
        services = self._given if self._given is not None else services_of(self.settings)
        check_ports(services)
        for service in services:
            process = ServiceProcess(service, self.settings.logs_dir / f"{service.name}.log")
            self.processes[service.name] = process
            process.start()
            logger.info("%s started, pid %d, log %s", service.name, process.pid, process.log_path)
        self._waiting = dict.fromkeys(self.processes, "it is starting")
        self.write_state("starting")

    def wait_ready(
        self, timeout_s: float | None = None, on_wait: Callable[[str], None] | None = None
    ) -> None:
        """Return when every service is ready. Raises StackError when a service ends, or after `timeout_s`.

        `on_wait` gets the names of the services that are not ready, with the reasons, whenever these change.
        """
        limit_s = self.settings.start_timeout_s if timeout_s is None else timeout_s
        deadline, reported = clock.monotonic() + limit_s, ""
        while waiting := self.waiting_for():
            if waiting != reported:
                reported = waiting
                self.write_state("starting", waiting)
                if on_wait:
                    on_wait(waiting)
            if clock.monotonic() > deadline:
                raise StackError(
                    f"not ready after {limit_s:.0f} s: {waiting}; logs: {self.settings.logs_dir}"
                )
            clock.pause(POLL_EVERY_S)
        self._note_at = 0.0
        self.check()
        self.write_state("up")

    def waiting_for(self) -> str:
        """Which services are not ready, and why; empty if all are. Raises ServiceDied if one has ended."""
        self.check()
        for name, process in self.processes.items():
            if name in self._waiting:
                reason = process.service.ready()
                if reason is None:
                    del self._waiting[name]
                else:
                    self._waiting[name] = reason
        return "; ".join(f"{name}: {reason}" for name, reason in self._waiting.items())

    def check(self) -> None:
        """Raises ServiceDied when a service has ended."""
        self.note_descendants()
        for process in self.processes.values():
            process.check()

    def note_descendants(self) -> None:
        """Note which processes the services have started, every `NOTE_DESCENDANTS_EVERY_S`."""
        now = clock.monotonic()
        if now < self._note_at:
            return
        self._note_at = now + NOTE_DESCENDANTS_EVERY_S
        children = all_children()
        for process in self.processes.values():
            process.note_descendants(children)

    def restart(self, name: str) -> None:
        """Start a service that has ended, after killing the descendants that it left. One that was asked to
        end (`weir restart`) has not failed, and is not counted."""
        process = self.processes[name]
        process.sweep()
        process.restarts += process.exit_code != 0
        process.start()
        self._waiting[name] = "it is restarting"
        logger.info("%s restarted, pid %d", name, process.pid)

    def stop(self) -> None:
        """Stop Redis last, so that work in flight still finds the services it needs."""
        for name, process in reversed(self.processes.items()):
            process.stop(self.settings.stop_timeout_s)
            logger.info("%s stopped", name)
        if self.processes:
            stack_state.path_in(self.settings.run_dir).unlink(missing_ok=True)
        self.processes = {}

    def write_state(self, phase: Phase, detail: str = "") -> None:
        services = {
            name: ProcessState.of(process.pid, process.service.url, str(process.log_path), process.restarts)
            for name, process in self.processes.items()
        }
        parent = ProcessState.of(os.getpid())
        StackState(parent=parent, phase=phase, detail=detail, services=services).write(self.settings.run_dir)

    def _end_by_exception(self) -> None:
        """Make SIGTERM and a closed terminal raise an exception, as Ctrl-C does, so that the `with` ends."""
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING_SIGNALS)}
        self._set_handlers(dict.fromkeys(ENDING_SIGNALS, _raise_exit))

    def _set_handlers(self, handlers: dict[int, Handler]) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                with suppress(TypeError):  # a handler that C code installed cannot be restored
                    signal.signal(number, handler)


def _raise_exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
