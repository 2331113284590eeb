"""Compares two texts: OpenAI's graders `string_check` (1 if a text equals or contains another one, else 0)
and `text_similarity` (from 0 to 1).

| metric | |
|---|---|
| fuzzy_match | rapidfuzz's WRatio of both texts in lower case, without punctuation |
| bleu, gleu | nltk's sentence BLEU (up to 4-grams, smoothed) and Google BLEU, of nltk's word tokens |
| rouge_1 … rouge_5, rouge_l | the F-measure of rouge-score, without a stemmer |

OpenAI names rapidfuzz, and no library for the other metrics; these are the libraries that its Python graders
can import. The cost of `fuzzy_match` and `rouge_l` grows with the product of both lengths, so it is bounded.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

from nltk.tokenize import NLTKWordTokenizer
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from nltk.translate.gleu_score import sentence_gleu
from rapidfuzz import fuzz, utils
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

from reward_service.graders.grade import TextTooLong

SimilarityMetric = Literal[
    "cosine",
    "fuzzy_match",
    "bleu",
    "gleu",
    "meteor",
    "rouge_1",
    "rouge_2",
    "rouge_3",
    "rouge_4",
    "rouge_5",
    "rouge_l",
]

UNAVAILABLE: dict[SimilarityMetric, str] = {
    "cosine": "cosine needs an embedding model, which this service does not have",
    "meteor": "meteor needs WordNet's data, which this service does not have",
}


StringOperation = Literal["eq", "ne", "like", "ilike"]

_CHECKS: dict[StringOperation, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}


def string_check(operation: StringOperation, text: str, reference: str) -> float:
    """`like` and `ilike`: whether `text` contains `reference`; `ilike` takes upper case for lower case."""
    return float(_CHECKS[operation](text, reference))


MAX_CHARS = 2**16
"""The longest text that is compared."""
MAX_FUZZY_CHAR_PAIRS = 12_000_000
"""The product of both lengths in characters; half a second."""
MAX_LCS_TOKEN_PAIRS = 2_000_000
"""The product of both lengths in tokens; half a second."""


def text_similarity(metric: SimilarityMetric, text: str, reference: str) -> float:
    """A number from 0 to 1. The metric is one that is available. Raises TextTooLong."""
    if max(len(text), len(reference)) > MAX_CHARS:
        raise TextTooLong(f"{metric} compares texts of at most {MAX_CHARS} characters")
    match metric:
        case "fuzzy_match":
            _bound(len(text) * len(reference), MAX_FUZZY_CHAR_PAIRS, metric)
            return float(fuzz.WRatio(text, reference, processor=utils.default_process)) / 100
        case "bleu":
            return _bleu(_words(text), _words(reference))
        case "gleu":
            words, wanted = _words(text), _words(reference)
            return float(sentence_gleu([wanted], words)) if words and wanted else 0.0
        case "rouge_l":
            tokens = [len(_rouge_tokenizer().tokenize(each)) for each in (text, reference)]
            _bound(tokens[0] * tokens[1], MAX_LCS_TOKEN_PAIRS, metric)
            return _rouge("rougeL", text, reference)
        case _:
            return _rouge(metric.replace("_", ""), text, reference)


def _bound(pairs: int, most: int, metric: SimilarityMetric) -> None:
    if pairs > most:
        raise TextTooLong(f"{metric} compares texts whose lengths have a product of at most {most}")


def _words(text: str) -> Sequence[str]:
    return list(NLTKWordTokenizer().tokenize(text))


def _bleu(words: Sequence[str], wanted: Sequence[str]) -> float:
    """Texts of fewer than four words are compared by the n-grams that they have."""
    if not words or not wanted:
        return 0.0
    smoothing = SmoothingFunction().method1
    return float(sentence_bleu([wanted], words, smoothing_function=smoothing, auto_reweigh=True))


@cache
def _rouge_tokenizer() -> DefaultTokenizer:
    return DefaultTokenizer(use_stemmer=False)


def _rouge(name: str, text: str, reference: str) -> float:
    scorer = RougeScorer([name], tokenizer=_rouge_tokenizer())
    return float(scorer.score(reference, text)[name].fmeasure)
