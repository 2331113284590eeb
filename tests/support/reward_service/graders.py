"""One of OpenAI's grader objects of each type."""

from typing import Any

CHECK: dict[str, Any] = {
    "type": "string_check",
    "name": "equal",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
SIMILAR: dict[str, Any] = {
    "type": "text_similarity",
    "name": "similar",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "evaluation_metric": "rouge_1",
}
PYTHON: dict[str, Any] = {
    "type": "python",
    "name": "longer",
    "source": "def grade(sample, item):\n    return len(sample['output_text']) / len(item['answer'])",
}
SCORE: dict[str, Any] = {
    "type": "score_model",
    "name": "score",
    "model": "judge",
    "input": [{"role": "user", "content": "Is it {{item.answer}}? {{sample.output_text}}"}],
}
LABEL: dict[str, Any] = {
    "type": "label_model",
    "name": "label",
    "model": "judge",
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    "labels": ["good", "bad"],
    "passing_labels": ["good"],
}
MULTI: dict[str, Any] = {
    "type": "multi",
    "name": "both",
    "graders": {"equal": CHECK, "similar": SIMILAR},
    "calculate_output": "0.5 * equal + 0.5 * similar",
}
