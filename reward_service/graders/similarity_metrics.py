"""The names of OpenAI's similarity metrics, and why some of them are not available here."""

from typing import Literal

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
