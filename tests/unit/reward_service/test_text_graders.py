"""String checks and text similarity."""

import pytest

from reward_service.graders.faults import TextTooLong
from reward_service.graders.similarity_metrics import SimilarityMetric
from reward_service.graders.string_check import StringOperation, string_check
from reward_service.graders.text_similarity import text_similarity


@pytest.mark.parametrize(
    ("operation", "text", "reference", "reward"),
    [
        ("eq", "Paris", "Paris", 1.0),
        ("eq", "Paris", "paris", 0.0),
        ("ne", "Paris", "paris", 1.0),
        ("ne", "Paris", "Paris", 0.0),
        ("like", "It is Paris.", "Paris", 1.0),
        ("like", "It is Paris.", "paris", 0.0),
        ("like", "Paris", "It is Paris.", 0.0),
        ("like", "a%c", "a_c", 0.0),
        ("ilike", "IT IS PARIS", "paris", 1.0),
        ("ilike", "STRASSE", "straße", 1.0),
        ("ilike", "Paris", "London", 0.0),
    ],
)
def test_string_checks(operation: StringOperation, text: str, reference: str, reward: float) -> None:
    assert string_check(operation, text, reference) == reward


METRICS: list[SimilarityMetric] = [
    "fuzzy_match",
    "bleu",
    "gleu",
    "rouge_1",
    "rouge_2",
    "rouge_3",
    "rouge_4",
    "rouge_5",
    "rouge_l",
]
SENTENCE = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("metric", METRICS)
def test_equal_texts_have_1_and_texts_without_a_common_word_0(metric: SimilarityMetric) -> None:
    assert text_similarity(metric, SENTENCE, SENTENCE) == pytest.approx(1.0)
    assert text_similarity(metric, SENTENCE, "") == 0.0
    assert text_similarity(metric, "", SENTENCE) == 0.0
    assert text_similarity(metric, "", "") == 0.0
    if metric != "fuzzy_match":
        assert text_similarity(metric, SENTENCE, "nothing in common") == 0.0
    between = text_similarity(metric, SENTENCE, "the quick brown fox jumps over a lazy dog")
    assert 0.0 < between < 1.0


@pytest.mark.parametrize(
    ("metric", "text", "reference", "score"),
    [
        # rapidfuzz: 2 · common characters / all characters of "hello  world" and "hello word"
        ("fuzzy_match", "Hello, World", "hello word!", 20 / 22),
        # F = 2PR/(P+R) of unigrams: 3 of 3 and 3 of 4
        ("rouge_1", "the cat sat", "the cat sat down", 2 * 1.0 * 0.75 / 1.75),
        ("rouge_2", "the cat sat", "the cat sat down", 2 * 1.0 * (2 / 3) / (5 / 3)),
        # the longest common subsequence "the sat" has 2 of 3 and 2 of 3
        ("rouge_l", "the dog sat", "the cat sat", 2 / 3),
        # GLEU: min of precision and recall over 1- to 4-grams: 2 + 1 of 3 + 2 + 1 n-grams
        ("gleu", "the cat ran", "the cat sat", 3 / 6),
        # BLEU of two words: sqrt(1/2 · the smoothed 0.1/1)
        ("bleu", "the dog", "the cat", (0.5 * 0.1) ** 0.5),
    ],
)
def test_scores_are_those_of_the_definitions(
    metric: SimilarityMetric, text: str, reference: str, score: float
) -> None:
    assert text_similarity(metric, text, reference) == pytest.approx(score)


def test_a_single_word_that_is_right_has_1() -> None:
    assert text_similarity("bleu", "Paris", "Paris") == text_similarity("gleu", "Paris", "Paris") == 1.0


@pytest.mark.parametrize(
    ("metric", "text", "reference"),
    [
        ("rouge_1", "x" * 70_000, "x"),
        ("fuzzy_match", "x" * 60_000, "y" * 60_000),
        ("rouge_l", "a b " * 8000, "a b " * 8000),
    ],
)
def test_long_texts_are_refused_before_they_are_compared(
    metric: SimilarityMetric, text: str, reference: str
) -> None:
    with pytest.raises(TextTooLong):
        text_similarity(metric, text, reference)
