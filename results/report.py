"""Writes README.md and a picture for each experiment, from the figures in results/data.

introduction.md, results/data/NAME-VARIANT-seedN.json ─▶ README.md, NAME.png
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill

import msgspec

from results.experiment import Experiment
from results.experiments import EXPERIMENTS
from results.figures import Judged, Spent, TrialResult
from results.trl.beside import TRL

HERE = Path(__file__).parent
DATA = HERE / "data"
WIDTH = 120
HEAD = (
    *("variant", "seed", "before", "after", "to the target: episodes", "CPU s", "s"),
    *("in all: episodes", "CPU s", "s", "steps", "trained", "left out"),
)
IN_TRL = (
    "one question and one answer, on the same first model, with {} answers a step, the same learning rate, "
    "loss and clipping, by TRL's `GRPOTrainer` in one process, which samples with transformers. Each step "
    "waits for its answers"
)


def results_of(name: str, data: Path) -> list[TrialResult]:
    """The results of an experiment, by variant and seed."""
    files = data.glob(f"{name}-*.json")
    found = [msgspec.json.decode(each.read_bytes(), type=TrialResult) for each in files]
    order = [*EXPERIMENTS[name].variants, TRL]
    return sorted(found, key=lambda each: (order.index(each.variant), each.seed))


def write_report(data: Path) -> None:
    """Write README.md, and the pictures that it shows."""
    for name, experiment in EXPERIMENTS.items():
        if results := results_of(name, data):
            draw(HERE / f"{name}.png", experiment, results)
    (HERE / "README.md").write_text(readme(data), encoding="utf-8")


def readme(data: Path = DATA) -> str:
    parts = [(HERE / "introduction.md").read_text(encoding="utf-8").rstrip()]
    parts += [
        section(experiment, results)
        for name, experiment in EXPERIMENTS.items()
        if (results := results_of(name, data))
    ]
    return "\n\n".join(parts) + "\n"


def section(experiment: Experiment, results: Sequence[TrialResult]) -> str:
    rows = [HEAD, ("---",) * len(HEAD), *(_row(each, experiment.target) for each in results)]
    meanings = {name: each.meaning for name, each in experiment.variants.items()}
    if experiment.trl_batch:
        meanings[TRL] = IN_TRL.format(experiment.trl_batch)
    asked = (
        f"{experiment.question} Evaluations are on {experiment.judged_on}. The target is {experiment.target}."
    )
    return "\n\n".join(
        [
            f"## {experiment.name}",
            fill(asked, WIDTH),
            fill(f"The first model: {experiment.warm_start}.", WIDTH),
            "\n".join(
                fill(f"- `{name}`: {meaning}.", WIDTH, subsequent_indent="  ")
                for name, meaning in meanings.items()
            ),
            *([fill(experiment.found, WIDTH)] if experiment.found else []),
            f"```bash\npython -m results {experiment.name}\n```",
            "\n".join(f"| {' | '.join(row)} |" for row in rows),
            "\n".join(_means(experiment, results)),
            f"![Mean reward of the last 256 episodes, by episodes]({experiment.name}.png)",
        ]
    )


def _row(result: TrialResult, target: float) -> tuple[str, ...]:
    of_trl, reached = result.variant == TRL, result.reached(target)
    return (
        *(result.variant, str(result.seed), _judged(result.before), _judged(result.after)),
        *(_spent(reached) if reached else ("-",) * 3),
        *_spent(result.spent),
        str(result.versions),
        *(("", "") if of_trl else (str(result.verdicts.get("trained", 0)), str(result.left_out))),
    )


def _judged(judged: Judged) -> str:
    return f"{judged.mean:.2f} [{judged.low:.2f}, {judged.high:.2f}]"


def _spent(spent: Spent) -> tuple[str, str, str]:
    return str(spent.episodes), f"{spent.cpu_s:.0f}", f"{spent.seconds:.0f}"


def _means(experiment: Experiment, results: Sequence[TrialResult]) -> list[str]:
    """A line for each variant: its means over the seeds."""
    lines = []
    for name in (*experiment.variants, TRL):
        of_variant = [each for each in results if each.variant == name]
        if not of_variant:
            continue
        after = fmean(each.after.mean for each in of_variant)
        line = f"- `{name}`: {fmean(each.before.mean for each in of_variant):.2f} → {after:.2f}"
        reached = [spent for each in of_variant if (spent := each.reached(experiment.target))]
        if reached:
            line += f"; the target after {fmean(each.episodes for each in reached):.0f} episodes and "
            line += f"{fmean(each.cpu_s for each in reached):.0f} CPU s"
        if len(reached) < len(of_variant):
            line += f"; {len(of_variant) - len(reached)} of {len(of_variant)} runs did not reach the target"
        lines.append(f"{line}.")
    return ["In the mean of the seeds:", "", *lines]


def draw(path: Path, experiment: Experiment, results: Sequence[TrialResult]) -> None:
    """A panel for each variant, a line for each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    known = (*experiment.variants, TRL)
    variants = [name for name in known if any(each.variant == name for each in results)]
    figure, row = plt.subplots(
        1, len(variants), figsize=(3 * len(variants) + 1, 3), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, variant in zip(row[0], variants, strict=True):
        for result in results:
            if result.variant == variant:
                episodes = [point.spent.episodes for point in result.curve]
                rewards = [point.reward for point in result.curve]
                panel.plot(episodes, rewards, label=f"seed {result.seed}")
        panel.axhline(experiment.target, color="tab:gray", linestyle="--", linewidth=1)
        panel.set(title=variant, xlabel="episodes")
    row[0][0].set(ylabel="reward of the last 256")
    row[0][-1].legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)
