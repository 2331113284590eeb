"""docs/metrics.md names all metrics of the trainer, and no others."""

import re
from pathlib import Path

from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.metric_files import lines
from trainer_service.settings import GuardSettings

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def documented(section: str) -> list[str]:
    """The names in the first column of a section's table."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    return re.findall(r"^\| `([^`]+)` \|", rest.split("\n## ")[0], re.M)


def test_a_step_has_the_names_of_the_document(harness: Harness) -> None:
    harness.step("g")
    named = documented("Of every step")
    assert set(lines(harness.root / "metrics.jsonl")[0]) == set(named)
    assert len(named) == len(set(named))


def test_a_step_with_a_critic_has_the_names_of_the_document_as_well(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"advantage": {"name": "gae"}}, critic={}).start()
    harness.step("g")
    named = documented("Of every step") + documented("With a critic")
    assert set(lines(harness.root / "metrics.jsonl")[0]) == set(named)


def test_an_evaluation_has_the_names_of_the_document(harness: Harness) -> None:
    harness.agents.evaluate("a", 1.0)
    harness.trainer.run_once()
    (line,) = lines(harness.root / "metrics.eval.jsonl")
    assert set(line) == {"step", "version", "time", *documented("Evaluation")}


def test_a_guard_has_the_name_and_the_default_of_the_document() -> None:
    defaults = GuardSettings()
    others = ("reward_groups", "roll_back", "max_recoveries", "recovery_lr_factor")
    given = defaults.model_dump(exclude=set(others))
    assert list(given) == documented("Guards")
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"| `{name}` | {value:g} |" in text for name, value in given.items())
    assert f"`reward_groups` ({defaults.reward_groups})" in text
    assert f"`max_recoveries` ({defaults.max_recoveries})" in text
    assert f"`recovery_lr_factor` ({defaults.recovery_lr_factor})" in text
    assert f"`roll_back` (default: {str(defaults.roll_back).lower()})" in text


def test_prometheus_has_the_names_of_the_document(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.agents.evaluate("a", 1.0)
    harness.step("g")
    of_steps = {f"weir_trainer_{name.replace('/', '_')}" for name in documented("Of every step")}
    counted = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in harness.registry.collect()
        if metric.name.startswith("weir_trainer_")
    }
    assert counted - of_steps == set(documented("Prometheus alone"))
    # Prometheus gets the tokens from a counter with another name, and adds the time itself.
    untold = {"weir_trainer_tokens", "weir_trainer_time"}
    assert of_steps - counted == untold
