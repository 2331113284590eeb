"""Ends this process if another rank is gone or silent, whatever this one waits for.

rank 0    every quarter of the timeout ─┬─▶ all ranks have answered, or each process ends by itself
rank 1 …  at once ──────────────────────┘

The ranks wait for days for the next command. If a host loses power or its network, no connection breaks: the
other hosts' ranks would wait for ever, and keep their GPUs.
"""

import logging
import os
from contextvars import copy_context
from datetime import timedelta
from threading import Event, Thread

import torch

from rollout_queue import clock

logger = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""How long a main thread that has seen the same failure may take to report it and to end the process."""


class RankWatch:
    """A thread of each rank, with a process group of its own. All ranks must make theirs together."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self._over = Event()
        self._thread = Thread(target=copy_context().run, args=(self._watch,), name="rank-watch", daemon=True)
        if ranks > 1:
            self._leads = torch.distributed.get_rank() == 0
            answers_within = timedelta(seconds=timeout_s * 3 / 4)
            self._group = torch.distributed.new_group(backend="gloo", timeout=answers_within)
            self._thread.start()

    def close(self) -> None:
        """Rank 0 ends the threads of all ranks; another rank waits until rank 0 has."""
        if self._ranks > 1:
            self._over.set()
            self._thread.join()

    def _watch(self) -> None:
        try:
            while self._all_go_on():
                if self._leads:
                    clock.wait(self._over, self._timeout_s / 4)
        except RuntimeError as error:
            logger.error("ends: a rank is gone, or was silent for %g s: %s", self._timeout_s, error)
            clock.pause(FAREWELL_S)
            os._exit(1)

    def _all_go_on(self) -> bool:
        """Whether rank 0 has not closed its watch. Raises RuntimeError if a rank does not answer."""
        going = torch.tensor(0 if self._leads and self._over.is_set() else 1)
        torch.distributed.all_reduce(going, group=self._group)
        return int(going) == self._ranks
