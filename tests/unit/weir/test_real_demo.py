"""The parts of the demo with a real model that need no services: its task, its model, and what it tells."""

import json

import pytest

from environments.settings import RunSettings
from weir.demo.extraction import FORMS, Extraction, asked_about, sentence_of
from weir.demo.lesson import Lesson, LessonOutcome, told


def graded(seed: int, answer: str) -> float:
    task = Extraction()
    asked = task.reset({"seed": seed})
    assert asked[-1] == {"role": "user", "content": sentence_of(seed)[0]}
    _, reward, ended, cut_off, _ = task.step(answer)
    assert (ended, cut_off) == (True, False)
    return reward


@pytest.mark.parametrize("written", [json.dumps, lambda said: f"\n{json.dumps(said, indent=2)}\n"])
def test_an_object_that_says_the_same_is_right_however_it_is_written(written) -> None:  # type: ignore[no-untyped-def]
    for seed in range(50):
        assert graded(seed, written(sentence_of(seed)[1])) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda said: "",
        lambda said: "[]",
        lambda said: f"Here it is: {json.dumps(said)}",
        lambda said: json.dumps(said | {"age": str(said["age"])}),
        lambda said: json.dumps(said | {"job": "cook"}),
        lambda said: json.dumps({"name": said["name"], "age": said["age"]}),
        lambda said: json.dumps(said)[:-1],
        lambda said: '{"name": ' * 5000,
    ],
)
def test_anything_else_is_wrong(wrong) -> None:  # type: ignore[no-untyped-def]
    for seed in range(50):
        assert graded(seed, wrong(sentence_of(seed)[1])) == 0.0


def test_the_tasks_have_every_form_and_differ() -> None:
    sentences = {sentence_of(seed)[0] for seed in range(200)}
    assert len(sentences) > 190
    for form in FORMS:
        words = {word for word in form.replace(",", " ").split() if "{" not in word}
        assert any(words <= set(sentence.replace(",", " ").split()) for sentence in sentences)


def test_what_is_told_has_each_question_with_its_answers_before_and_after() -> None:
    questions = [asked_about(sentence_of(seed)[0]) for seed in (1, 2)]
    lesson = Lesson(RunSettings(environment="python:m:C"), {}, 2, 0.5, questions)
    reward = {"mean": 0.25, "low": 0.2, "high": 0.3}
    better = {"mean": 0.9, "low": 0.8, "high": 0.95}
    training = {"reward_start": 0.2, "reward_end": 0.9, "episodes": 640}
    before, after = {"reward": reward, "tasks": [0, 0]}, {"reward": better, "tasks": [0, 0]}
    answers = (["one\nline", "no"], ["yes", '{"a": 1}'])
    outcome = LessonOutcome(before, training, after, answers, 120.0)
    assert outcome.learned(0.5)
    assert not outcome.learned(0.95)
    assert not LessonOutcome(after, training, before, answers, 1.0).learned(0.1)
    assert told(lesson, outcome) == [
        "",
        f"asked:  {sentence_of(1)[0]}",
        "before: one line",
        "after:  yes",
        "",
        f"asked:  {sentence_of(2)[0]}",
        "before: no",
        'after:  {"a": 1}',
        "",
        "training: reward 0.20 → 0.90 in 640 episodes; all of it took 2.0 minutes",
        "before: 0.250 [0.200, 0.300] on 2 other tasks",
        "after: 0.900 [0.800, 0.950] on 2 other tasks",
    ]
