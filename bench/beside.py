"""The cost of this tree's gateway beside that of another tree, in one run: CPU per call.

python -m bench.beside TREE [--rounds N] [--calls N] [--kinds plain stream …] [--concurrency 1 32]

this tree:  load ─▶ gateway ─▶ engine stub
TREE:       load ─▶ gateway ─▶ engine stub

TREE is a checkout, for instance of `git worktree add`; both use this Python environment. They take turns,
batch by batch, so what else the machine does counts for both. Of two equal gateways the one that was started
later costs some percent more: for the second half of the rounds they are started in the other order.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.gateway import STREAM_TOKENS, TURN_TOKENS, Rig, measured, running_rig
from tests.support.tiny_model import make_tiny_model

HERE = Path(__file__).parents[1]
KINDS = ("plain", "responses", "messages", "completions", "stream")


@contextmanager
def rigs(trees: Sequence[Path], model: Path) -> Iterator[dict[Path, Rig]]:
    """A gateway of each tree, with a Redis and an engine stub of its own, in this order."""
    with ExitStack() as stack:
        found = {}
        for tree in trees:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            paths = ":".join(str(tree / part) for part in ("", "queue", "deploy"))
            command = [sys.executable, "-P", "-m", "gateway"]
            rig = running_rig(model, folder, settings={"PYTHONPATH": paths}, command=command)
            found[tree] = stack.enter_context(rig)
            for kind in KINDS:
                measured(found[tree], 8, 100, TURN_TOKENS, kind)  # warm
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--rounds", type=int, default=20, help="batches of each")
    parser.add_argument("--calls", type=int, default=100, help="of a batch; a tenth of them are streamed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    asked = parser.parse_args()
    other = asked.tree.resolve()
    spent: dict[tuple[str, int], dict[Path, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model")
        for trees in ((HERE, other), (other, HERE)):
            with rigs(trees, model) as found:
                for kind in asked.kinds:
                    for concurrency in asked.concurrency:
                        row = spent.setdefault((kind, concurrency), {HERE: [], other: []})
                        for number in range(max(asked.rounds // 2, 1)):
                            for tree in trees[:: 1 if number % 2 else -1]:
                                row[tree].append(cost(found[tree], concurrency, asked.calls, kind))
    print("| calls | concurrency | CPU µs, this tree | the other | ratio | of pairs |")
    print("|---|---|---|---|---|---|")
    for (kind, concurrency), row in spent.items():
        own, others = row[HERE], row[other]
        medians = statistics.median(own), statistics.median(others)
        pairs = statistics.median(a / b for a, b in zip(own, others, strict=True))
        cells = (*medians, medians[0] / medians[1], pairs)
        print("| {} | {} | {:.0f} | {:.0f} | {:.3f} | {:.3f} |".format(kind, concurrency, *cells))


def cost(rig: Rig, concurrency: int, calls: int, kind: str) -> float:
    """Microseconds of CPU a call."""
    streamed = kind == "stream"
    count = max(calls // 10 if streamed else calls, concurrency)
    return measured(rig, concurrency, count, STREAM_TOKENS if streamed else TURN_TOKENS, kind)["cpu_us"]


if __name__ == "__main__":
    main()
