"""The cost of one optimizer step of Weir, plain torch and TRL: real tokens per CPU second, and memory.

python -m bench.trainer [--rollouts N] [--rounds N] [--slow-rollouts N] [--slow-rounds N] [--contenders …]
                        [--smoke]

rollouts (bench.rollouts), a random Qwen3 of 100M (bench.policies)
    └▶ each contender, round after round, in a process with one thread (bench.contenders, bench.trl.step)
hidden states, 152k by 4k ─▶ log-probabilities, ours and naive (bench.logprob)

A step is forward, loss, backward, clip and AdamW in float32, after a small warm-up step. --smoke uses a tiny
model, and runs all but TRL in this process: it only shows that the benchmark runs."""

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
from dataclasses import dataclass
from pathlib import Path

from bench.rollouts import drawn, fewer, read, write

ROOT = Path(__file__).parents[1]
TRL = ROOT / "run" / "bench" / "trl" / "bin" / "python"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
SEED = 200
"""This seed gives 64 rollouts with 18,873 tokens; the longest has 1,812."""
LABELS = {
    "ours": "ours: DeepSpeed, ZeRO {zero_stage}, one rank",
    "packed": "(a) plain torch, packed as ours",
    "padded": "(b) plain torch, 4 rows of like length at a time, padded",
    "padded-globally": "(b) plain torch, 4 rows at a time, padded to the longest of all",
    "trl": "(c) TRL 1.16.0 `GRPOTrainer`, its defaults",
}
SLOW = {"padded-globally", "trl"}
"""The contenders that get fewer rollouts."""

Facts = dict[str, float]


@dataclass(frozen=True)
class Size:
    """The sizes of a measurement."""

    policy: str
    vocabulary: int
    median: int
    longest: int
    head: tuple[int, int, int]
    """Tokens, vocabulary and width of the log-probabilities whose memory is measured."""


WHOLE = Size("whole", 32_000, median=190, longest=2048, head=(4096, 151_936, 768))
SMOKE = Size("small", 1_000, median=24, longest=96, head=(64, 1_000, 32))


@dataclass(frozen=True)
class Measurements:
    """The figures of the processes, by contender. Steps have one entry for each round."""

    steps: dict[str, list[Facts]]
    heads: dict[str, Facts]

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
    parser.add_argument("--rollouts", type=int, default=64, help="at most 64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--slow-rollouts", type=int, default=16, help="for contenders that pad to the longest of all"
    )
    parser.add_argument("--slow-rounds", type=int, default=1)
    parser.add_argument("--contenders", nargs="+", choices=LABELS, default=list(LABELS))
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args(arguments)
    size = SMOKE if asked.smoke else WHOLE
    with tempfile.TemporaryDirectory() as name:
        measurements = measured(Path(name), size, asked)
    print_steps(measurements)
    print_heads(measurements, size)
    print_targets(measurements)


def measured(folder: Path, size: Size, asked: argparse.Namespace) -> Measurements:
    """Measure round after round, so that other load on the machine affects all contenders alike."""
    given = files(folder, size, asked)
    measurements = Measurements({}, {})
    for number in range(max(asked.rounds, asked.slow_rounds)):
        for name in asked.contenders:
            slow = name in SLOW
            if number >= (asked.slow_rounds if slow else asked.rounds):
                continue
            if (facts := one_step(name, folder / "model", given[slow], asked.smoke)) is not None:
                measurements.steps.setdefault(name, []).append(facts)
    for name in ("ours", "naive"):
        measurements.heads[name] = process("bench.logprob", name, *size.head, here=asked.smoke)
    return measurements


def files(folder: Path, size: Size, asked: argparse.Namespace) -> tuple[Path, Path]:
    """The files with all rollouts and with those for slow contenders. Makes the policy beside them."""
    everything, some = folder / "all.json", folder / "some.json"
    of_64 = drawn(64, size.vocabulary, size.median, size.longest, SEED)
    write(fewer(of_64, asked.rollouts), everything)
    process("bench.policies", size.policy, folder / "model", everything, here=asked.smoke)
    write(fewer(read(everything), asked.slow_rollouts), some)
    return everything, some


def one_step(name: str, model: Path, file: Path, smoke: bool) -> Facts | None:
    """The figures of one step; None for TRL without its environment."""
    if name != "trl":
        return process("bench.contenders", name, model, file, here=smoke)
    if not TRL.is_file():
        note("TRL is left out: `make bench-trainer` makes its environment")
        return None
    return process("bench.trl.step", model, file, python=TRL)


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
    note(f"{module} {words[0]}: {facts}")
    return facts


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_steps(measurements: Measurements) -> None:
    print(
        "| one step of | rollouts | real tokens | CPU s | tokens/s | of (a) | peak RSS MiB | gradient norm |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, rounds in measurements.steps.items():
        counts = [f"{measurements.median(name, fact):.0f}" for fact in ("rollouts", "tokens")]
        speed = [f"{measurements.median(name, 'cpu_s'):.1f}", f"{measurements.rate(name):.1f}"]
        others = [f"{measurements.ratio(name, 'packed'):.2f}", f"{measurements.median(name, 'peak_mib'):.0f}"]
        label = LABELS[name].format(**rounds[0])
        print(" | ".join([f"| {label}", *counts, *speed, *others, f"{rounds[-1]['gradient_norm']:.4f} |"]))


def print_heads(measurements: Measurements, size: Size) -> None:
    count, vocabulary, width = size.head
    print(
        f"\n| log-probability of {count} tokens, vocabulary {vocabulary}, width {width} | peak MiB | CPU s |"
    )
    print("|---|---|---|")
    for name, facts in measurements.heads.items():
        print(f"| {name} | {facts['peak_mib']:.0f} | {facts['cpu_s']:.1f} |")


def print_targets(measurements: Measurements) -> None:
    ours, naive = (measurements.heads[name]["peak_mib"] for name in ("ours", "naive"))
    print(f"\nOurs: {measurements.ratio('ours', 'packed'):.2f} of (a), the target is 0.9;", end=" ")
    print(f"{measurements.ratio('ours', 'trl'):.1f} times TRL, the target is 5;", end=" ")
    print(f"the log-probability's memory {ours:.0f} of {naive:.0f} MiB, the target is a fifth.")


if __name__ == "__main__":
    main()
