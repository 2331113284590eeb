"""Runs a module like `python -m`, and counts its call stacks by CPU time.

python -m bench.stack_sampler FILE MODULE     SIGUSR1 writes the samples since the last signal to FILE

A timer on the CPU time (ITIMER_PROF) takes the samples. Profilers that use the wall clock, or that slow down
every call, give other results. The shortest time between two samples is the kernel's tick of 1 to 10 ms."""

import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY_S = 0.001


class StackSampler:
    """Counts stacks, each as `file:function` from the outermost to the innermost frame."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stacks: Counter[str] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR1, self._write)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        self._stacks[";".join(reversed(stack))] += 1

    def _write(self, _: int, frame: FrameType | None) -> None:
        stacks, self._stacks = self._stacks, Counter()
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(stacks), encoding="utf-8")
        draft.replace(self._file)  # a reader never sees a part of the file


if __name__ == "__main__":
    _, file, name, *arguments = sys.argv
    StackSampler(Path(file)).start()
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
