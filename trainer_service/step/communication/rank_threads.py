"""A background thread on every rank. Rank 0 gives orders to all of them, and gets what each answers.

These threads have process groups of their own, because the main threads may be in a collective of the
training meanwhile. If a rank dies, its connections break: rank 0's thread raises, and the trainer ends.
"""

import logging
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Generic, TypeVar

import torch

from trainer_service.step.communication.command_channel import CommandChannel

logger = logging.getLogger(__name__)

LONGEST_ORDER = timedelta(minutes=30)
"""How long rank 0 waits for the other ranks after its own part is done, which is as large."""
Answer = TypeVar("Answer")
Order = TypeVar("Order")


class RankThreads(Generic[Order, Answer]):
    """Rank 0's side. One thread at a time calls it. All ranks must make their sides in the same order."""

    def __init__(self, ranks: int) -> None:
        self._alone = ranks == 1
        self._orders = CommandChannel[Order](ranks)
        self._answers = _Answers(ranks)

    def carry_out(self, order: Order, own: Callable[[], Answer]) -> list[Answer]:
        """Have every rank carry out `order`; `own` does rank 0's part. Returns the answers of all ranks when
        no rank works on it any more. Raises the OSError of a rank whose disk refuses, and RuntimeError if a
        rank failed otherwise, or is gone. A single rank raises what `own` raises."""
        if self._alone:
            return [own()]
        self._orders.send(order)
        answers: list[Answer] = []
        for answer in self._answers.gather(_attempt(own)):
            if isinstance(answer, Exception):
                raise answer
            answers.append(answer)
        return answers

    def close(self) -> None:
        """End the threads of the other ranks."""
        self._orders.send(None)


class RankThread(Generic[Order, Answer]):
    """The side of another rank: a thread that carries out rank 0's orders."""

    def __init__(self, ranks: int, name: str, carry_out: Callable[[Order], Answer]) -> None:
        self._carry_out = carry_out
        self._orders = CommandChannel[Order](ranks)
        self._answers = _Answers(ranks)
        # A daemon, because it cannot be told to end if rank 0 is gone.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until rank 0 has ended this thread."""
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.receive()) is not None:
            self._answers.gather(_attempt(lambda order=order: self._carry_out(order)))  # type: ignore[misc]


def _attempt(work: Callable[[], Answer]) -> Answer | Exception:
    """What `work` returns or raises, in a form that travels to rank 0."""
    try:
        return work()
    except OSError as error:
        logger.warning("this rank's disk refuses: %s", error)
        return error
    except Exception as error:
        logger.exception("this rank failed in the background")
        return RuntimeError(f"a rank failed in the background: {error!r}")


class _Answers:
    """Brings one value from each rank to rank 0."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._group = (
            torch.distributed.new_group(backend="gloo", timeout=LONGEST_ORDER) if ranks > 1 else None
        )

    def gather(self, value: Answer) -> list[Answer]:
        """The values of all ranks on rank 0, and nothing on the others. Raises RuntimeError if a rank is gone
        or takes too long."""
        if self._group is None:
            return [value]
        on_rank_0 = torch.distributed.get_rank() == 0
        values: list[Answer] | None = [value] * self._ranks if on_rank_0 else None
        try:
            torch.distributed.gather_object(value, values, dst=0, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(f"a rank is gone, or had no answer for {LONGEST_ORDER}") from error
        return values or []
