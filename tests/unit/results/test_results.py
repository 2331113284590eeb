"""The figures of the experiments, their page, and the rows of their warm starts."""

from pathlib import Path

import msgspec
import pytest

from gateway.language.render import ChatRenderer
from results.experiments import EXPERIMENTS
from results.experiments.errands import call, errand
from results.figures import WINDOW, CurvePoint, Judged, Spent, TrialResult, curve_of
from results.report import HERE, readme, results_of
from results.warm_starts import Conversation, row_of
from weir.demo.student import write_student
from weir.demo.task import TOOL

# What a run's figures are made of: its curve, and what it took to reach a target


def result_of(rewards: list[float]) -> TrialResult:
    spent = [Spent(number, number / 10, number / 5) for number in range(1, len(rewards) + 1)]
    judged = Judged(0.0, 0.0, 0.0)
    return TrialResult(
        experiment="countdown",
        variant="async",
        seed=0,
        before=judged,
        after=judged,
        versions=1,
        curve=curve_of(rewards, spent),
        load=1.0,
    )


def test_a_target_is_reached_by_the_last_episodes_alone() -> None:
    result = result_of([0.0] * 1000 + [1.0] * 1000)
    found = result.reached(0.5)
    assert found is not None
    apart = found.episodes - (1000 + WINDOW // 2)
    assert 0 <= apart < 20, "a curve has a point for each hundredth of the episodes"
    assert (found.seconds, found.cpu_s) == (found.episodes / 10, found.episodes / 5)
    assert result.reached(1.1) is None


def test_a_curve_begins_with_a_full_window_and_ends_with_the_last_episodes() -> None:
    result = result_of([0.0] * 1000 + [1.0] * 1000)
    assert result.curve[0] == CurvePoint(0.0, Spent(WINDOW, WINDOW / 10, WINDOW / 5))
    assert result.curve[-1] == CurvePoint(1.0, result.spent)
    assert result.spent.episodes == 2000
    assert result_of([1.0] * WINDOW).reached(1.0) == Spent(WINDOW, WINDOW / 10, WINDOW / 5)
    with pytest.raises(ValueError, match="needs 256 episodes"):
        curve_of([1.0] * (WINDOW - 1), [])


def test_figures_are_read_as_they_were_written() -> None:
    result = result_of([0.5] * 300)
    assert msgspec.json.decode(msgspec.json.encode(result), type=TrialResult) == result


# The page says what the files of figures say


def result(variant: str, seed: int, *, reached: bool) -> TrialResult:
    return TrialResult(
        experiment="countdown",
        variant=variant,
        seed=seed,
        before=Judged(0.1, 0.05, 0.15),
        after=Judged(0.5, 0.45, 0.55),
        versions=50,
        curve=[
            CurvePoint(0.9 if reached else 0.1, Spent(1000, 20.0, 40.0)),
            CurvePoint(0.1, Spent(3072, 60.0, 120.0)),
        ],
        load=1.0,
    )


def test_the_page_in_the_repository_is_that_of_its_data() -> None:
    assert (HERE / "README.md").read_text(encoding="utf-8") == readme()


def test_each_experiment_has_three_seeds_of_each_variant_and_a_picture() -> None:
    for name, experiment in EXPERIMENTS.items():
        known = [*experiment.variants, *(["trl"] if experiment.trl_batch else [])]
        found = [(each.variant, each.seed) for each in results_of(name, HERE / "data")]
        assert found == [(variant, seed) for variant in known for seed in (0, 1, 2)], name
        assert (HERE / f"{name}.png").exists()


def test_a_run_that_missed_the_target_is_told(tmp_path: Path) -> None:
    for each in (result("async", 0, reached=True), result("async", 1, reached=False)):
        (tmp_path / f"countdown-async-seed{each.seed}.json").write_bytes(msgspec.json.encode(each))
    page = readme(tmp_path)
    assert "| async | 0 | 0.10 [0.05, 0.15] | 0.50 [0.45, 0.55] | 1000 | 40 | 20 | 3072 |" in page
    assert "| async | 1 | 0.10 [0.05, 0.15] | 0.50 [0.45, 0.55] | - | - | - | 3072 |" in page
    assert "the target after 1000 episodes and 40 CPU s; 1 of 2 runs did not reach the target" in page


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_figure_of_the_data_is_read_as_it_was_written(name: str) -> None:
    for path in (HERE / "data").glob(f"{name}-*.json"):
        assert path.stem == "{0.experiment}-{0.variant}-seed{0.seed}".format(
            msgspec.json.decode(path.read_bytes(), type=TrialResult)
        )


# The rows of a warm start are the conversations as the gateway records them


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    directory = tmp_path_factory.mktemp("student")
    write_student(directory)
    return ChatRenderer(directory)


def said_in(renderer: ChatRenderer, conversation: Conversation) -> list[str]:
    """The texts that a row teaches, each up to its end token."""
    ids, mask = row_of(renderer, conversation)
    taught = renderer.tokenizer.decode([token for token, one in zip(ids, mask, strict=True) if one])
    return taught.split("<|im_end|>")


def test_a_row_teaches_what_the_model_says_and_nothing_else(renderer: ChatRenderer) -> None:
    conversation = Conversation(
        [[{"role": "user", "content": "one?"}], [{"role": "user", "content": "two?"}]], ["1", "2"]
    )
    assert said_in(renderer, conversation) == ["1", "2", ""]
    ids, _ = row_of(renderer, conversation)
    assert "two?" in renderer.tokenizer.decode(ids)


def test_a_row_of_an_errand_teaches_its_calls(renderer: ChatRenderer) -> None:
    conversation = errand("abcd", "abxd", (dict(TOOL),))
    assert said_in(renderer, conversation) == [*map(call, "abxd"), ""]


def test_a_row_is_what_the_whole_conversation_renders_to(tmp_path: Path) -> None:
    write_student(tmp_path)
    renderer = ChatRenderer(tmp_path)
    heard = [{"role": "user", "content": "one?"}], [{"role": "user", "content": "two?"}]
    ids, _ = row_of(renderer, Conversation(heard, ["1", "2"]))
    whole = [*heard[0], {"role": "assistant", "content": "1"}, *heard[1]]
    rendered = list(renderer.render(whole, None))
    assert ids[: len(rendered)] == rendered
