"""The cost of one optimizer step of Weir, plain torch and TRL: real tokens per CPU second, and memory.

python -m bench.trainer [--workloads …] [--contenders …] [--rounds N] [--slow-rounds N] [--rollouts N]
                        [--slow-rollouts N] [--smoke]

for each workload (bench.workloads):
    rollouts (bench.rollouts), a random policy (bench.policies)
        └▶ each contender, round after round, in a process with one thread (bench.contenders, bench.trl.step)
hidden states, 152k by 4k ─▶ log-probabilities, ours and naive (bench.logprob)

A step is forward, loss, backward, clip and AdamW, after a small warm-up step. --smoke uses tiny models, and
runs all but TRL in this process: it only shows that the benchmark runs."""

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.rollouts import fewer, read, write
from bench.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[1]
TRL = ROOT / "run" / "bench" / "trl" / "bin" / "python"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LABELS = {
    "ours": "ours: DeepSpeed, ZeRO {zero_stage}, one rank",
    "packed": "(a) plain torch, packed as ours",
    "padded": "(b) plain torch, 4 rows of like length at a time, padded",
    "padded-globally": "(b) plain torch, 4 rows at a time, padded to the longest of all",
    "trl": "(c) TRL 1.16.0 `GRPOTrainer`, its defaults",
}
SLOW = {"padded-globally", "trl"}
"""The contenders that get fewer rollouts, and fewer rounds."""
HEAD, SMOKE_HEAD = (4096, 151_936, 768), (64, 1_000, 32)
"""Tokens, vocabulary and width of the log-probabilities whose memory is measured."""

Facts = dict[str, float]


@dataclass(frozen=True)
class Measurements:
    """The figures of the processes of a workload, by contender. Steps have one entry for each round."""

    workload: Workload
    steps: dict[str, list[Facts]]

    def median(self, name: str, fact: str) -> float:
        return statistics.median(facts[fact] for facts in self.steps[name])

    def rate(self, name: str) -> float:
        """Real tokens per CPU second."""
        return self.median(name, "tokens") / self.median(name, "cpu_s")

    def ratio(self, name: str, other: str) -> float:
        """The speed of a contender relative to another; NaN if one of them was left out."""
        both = name in self.steps and other in self.steps
        return self.rate(name) / self.rate(other) if both else math.nan


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=LABELS, default=list(LABELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow-rounds", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=64, help="of workload plain, at most 64")
    parser.add_argument(
        "--slow-rollouts", type=int, default=1024, help="for contenders that pad to the longest of all"
    )
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args(arguments)
    measured = {}
    for name in asked.workloads:
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = measurements(name, Path(folder), asked)
        print_steps(name, measured[name])
    head = SMOKE_HEAD if asked.smoke else HEAD
    heads = {name: process("bench.logprob", name, *head, here=asked.smoke) for name in ("ours", "naive")}
    print_heads(heads, head)
    print_targets(measured, heads)


def measurements(name: str, folder: Path, asked: argparse.Namespace) -> Measurements:
    """Measure round after round, so that other load on the machine affects all contenders alike."""
    workload = WORKLOADS[name]
    given = files(name, folder, asked)
    measured = Measurements(workload, {})
    for number in range(max(asked.rounds, asked.slow_rounds)):
        for contender in (each for each in workload.contenders if each in asked.contenders):
            slow = contender in SLOW
            if number >= (asked.slow_rounds if slow else asked.rounds):
                continue
            facts = one_step(contender, name, folder / "model", given[slow], asked.smoke)
            if facts is not None:
                measured.steps.setdefault(contender, []).append(facts)
    return measured


def files(name: str, folder: Path, asked: argparse.Namespace) -> tuple[Path, Path]:
    """The files with all rollouts and with those for slow contenders. Makes the policy beside them."""
    workload, everything, some = WORKLOADS[name], folder / "all.json", folder / "some.json"
    drawn = workload.smoke() if asked.smoke else workload.draw()
    write(fewer(drawn, asked.rollouts) if name == "plain" else drawn, everything)
    size = "smoke" if asked.smoke else "whole"
    process("bench.policies", name, size, folder / "model", everything, here=asked.smoke)
    write(fewer(read(everything), min(asked.slow_rollouts, workload.slow_rollouts)), some)
    return everything, some


def one_step(name: str, workload: str, model: Path, file: Path, smoke: bool) -> Facts | None:
    """The figures of one step; None for TRL without its environment."""
    if name != "trl":
        return process("bench.contenders", name, workload, model, file, here=smoke)
    if not TRL.is_file():
        note("TRL is left out: `make bench-trainer` makes its environment")
        return None
    return process("bench.trl.step", workload, model, file, python=TRL)


def process(
    module: str, *arguments: object, python: Path = Path(sys.executable), here: bool = False
) -> Facts:
    """The figures that a module prints in its last line. It runs in its own process unless `here`.

    Raises SystemExit if the process failed.
    """
    words = [str(argument) for argument in arguments]
    if here:
        with contextlib.redirect_stdout(io.StringIO()) as captured:
            importlib.import_module(module).main(words)
        output = captured.getvalue()
    else:
        environment = {**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1"}
        command = [str(python), "-m", module, *words]
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if ran.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{ran.stderr[-2000:]}")
        output = ran.stdout
    facts: Facts = json.loads(output.splitlines()[-1])
    note(f"{module} {' '.join(words[:2])}: {facts}")
    return facts


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_steps(name: str, measured: Measurements) -> None:
    print(f"\n{name}: {measured.workload.what}\n")
    print(
        "| one step of | rollouts | real tokens | CPU s | tokens/s | of (a) | peak RSS MiB | gradient norm |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for contender, rounds in measured.steps.items():
        counts = [f"{measured.median(contender, fact):.0f}" for fact in ("rollouts", "tokens")]
        speed = [f"{measured.median(contender, 'cpu_s'):.1f}", f"{measured.rate(contender):.1f}"]
        peak = f"{measured.median(contender, 'peak_mib'):.0f}"
        others = [f"{measured.ratio(contender, 'packed'):.2f}", peak]
        label = LABELS[contender].format(**rounds[0])
        print(" | ".join([f"| {label}", *counts, *speed, *others, f"{rounds[-1]['gradient_norm']:.4f} |"]))
    sys.stdout.flush()


def print_heads(heads: Mapping[str, Facts], head: tuple[int, int, int]) -> None:
    count, vocabulary, width = head
    print(
        f"\n| log-probability of {count} tokens, vocabulary {vocabulary}, width {width} | peak MiB | CPU s |"
    )
    print("|---|---|---|")
    for name, facts in heads.items():
        print(f"| {name} | {facts['peak_mib']:.0f} | {facts['cpu_s']:.1f} |")


def print_targets(measured: Mapping[str, Measurements], heads: Mapping[str, Facts]) -> None:
    print("\n| | ours, of (a) | target | ours, of TRL |")
    print("|---|---|---|---|")
    for name, each in measured.items():
        ratio, of_trl = each.ratio("ours", "packed"), each.ratio("ours", "trl")
        print(f"| {name} | {ratio:.2f} | {each.workload.target:g} | {of_trl:.1f} |")
    ours, naive = (heads[name]["peak_mib"] for name in ("ours", "naive"))
    print(f"\nThe log-probability's memory is {ours:.0f} of {naive:.0f} MiB; the target is a fifth.")


if __name__ == "__main__":
    main()
