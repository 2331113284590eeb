"""The real engine constrains answers to a grammar: even a random model's answers must follow it."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from gateway.errors import InvalidRequest
from gateway.language.call_syntax import SYNTAX_OF_FAMILY, FormatOrigin, JsonFormat, StructuralTag
from gateway.language.constraint import constraint_of
from gateway.language.grammar_cost import MOST_S, fitted
from gateway.language.schema import check_schema
from tests.support.gateway.families_agent import TOOL, call, renderer_of, sampled, told
from tests.support.system.real_system import ENGINE_PYTHON, System
from tests.support.system.turns import scored

ROOT = Path(__file__).parents[3]
GET: Any = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {"key": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["key", "n"],
        },
    },
}
PUT: Any = {
    "type": "function",
    "function": {
        "name": "put",
        "parameters": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"]},
    },
}
SCHEMA = GET["function"]["parameters"]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


@pytest.fixture
def ticket(system: System) -> Any:
    """A session that keeps the caller's own sampling."""
    return system.post("/sessions", {"train": False})


@pytest.fixture
def thoughtless(system: System, tiny_model: Path, ticket: Any) -> Iterator[Any]:
    """Makes calls in which the model cannot begin a thought, because a random model would never end it."""
    tokens = json.loads((tiny_model / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    think = next(str(token["id"]) for token in tokens if token["content"] == "<think>")
    client = system.client(ticket)

    def ask(**wish: Any) -> Any:
        arguments: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1500, **wish}
        return client.chat.completions.create(model="m", logit_bias={think: -100}, **arguments)

    yield ask
    client.close()


def allowed(name: str) -> Any:
    return {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": name}]}


def keeps(arguments: Any) -> bool:
    return set(arguments) == {"key", "n"} and arguments["key"] in ("a", "b") and arguments["n"] in range(10)


def test_a_required_call_is_made_with_arguments_that_fit(thoughtless: Any) -> None:
    for _ in range(3):
        (choice,) = thoughtless(tools=[GET, PUT], tool_choice="required").choices
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        for made in choice.message.tool_calls:
            arguments = json.loads(made.function.arguments)
            if made.function.name == "get":
                assert keeps(arguments)
            else:
                assert (made.function.name, arguments["v"] in (True, False)) == ("put", True)


@pytest.mark.long
def test_a_guided_answer_matches_its_pattern_or_is_one_of_its_choices(thoughtless: Any) -> None:
    for wish, fits in (
        ({"guided_regex": "[a-c]{2,4}-[0-9]"}, lambda text: re.fullmatch("[a-c]{2,4}-[0-9]", text)),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_json": SCHEMA}, lambda text: keeps(json.loads(text))),
    ):
        (choice,) = thoughtless(extra_body=wish).choices
        assert fits(choice.message.content), (wish, choice)


@pytest.mark.long
def test_a_named_function_and_one_call_at_a_time_are_one_call(thoughtless: Any) -> None:
    wish = {"type": "function", "function": {"name": "put"}}
    (choice,) = thoughtless(tools=[GET, PUT], tool_choice=wish).choices
    assert [made.function.name for made in choice.message.tool_calls] == ["put"]
    replies = thoughtless(tools=[GET, PUT], tool_choice="required", parallel_tool_calls=False, n=6)
    assert [len(choice.message.tool_calls) for choice in replies.choices] == [1] * 6


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_answer_fits_its_schema(thoughtless: Any, stream: bool) -> None:
    reply = thoughtless(response_format=FORMAT, stream=stream)
    if stream:
        content = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
    else:
        content = reply.choices[0].message.content
    assert keeps(json.loads(content))


def test_recorded_logprobs_are_of_the_masked_distribution(
    system: System, thoughtless: Any, ticket: Any
) -> None:
    """A token that the grammar forces has probability 1 in the record, but not under the policy itself."""
    thoughtless(response_format=FORMAT)
    (turn,) = system.get(f"/sessions/{ticket['session_id']}?tokens=true")["turns"]
    pairs = list(zip(turn["logprobs"], scored(system.engine_url, turn), strict=True))
    assert all(masked >= unmasked - 1e-3 for masked, unmasked in pairs)
    assert any(masked == 0.0 and unmasked < -1 for masked, unmasked in pairs)
    assert turn["sampling"]["used"]["constraint"] == "json_schema"


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "string", "minLength": 5, "maxLength": 1},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(["},
        {"type": "string", "pattern": "a\u0000b"},
        {"enum": []},
    ],
)
def test_a_schema_that_cannot_be_compiled_is_the_callers_fault(
    system: System, ticket: Any, schema: Any, stream: bool
) -> None:
    wish: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    with pytest.raises(openai.BadRequestError):
        system.say(ticket, "hi", response_format=wish, stream=stream)
    assert system.say(ticket, "hi").choices


@pytest.mark.long
def test_the_largest_schemas_that_are_taken_leave_the_engine_alive(system: System, ticket: Any) -> None:
    deep: Any = {"type": "integer"}
    for _ in range(31):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide = {"enum": [f"value-{index}" for index in range(4000)]}
    for schema in (deep, wide):
        wish: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        assert system.say(ticket, "hi", response_format=wish).choices
    assert system.rollout()["restarts"] == 0


def test_the_grammar_lets_through_what_each_template_writes(tmp_path: Path) -> None:
    """Each grammar accepts the tokens of a thought and of one or two calls, as its family's template writes
    them, unless another tool is the only one that is allowed."""
    cases: list[dict[str, Any]] = []
    for family, syntax in SYNTAX_OF_FAMILY.items():
        renderer = renderer_of(tmp_path, family)
        thought = {} if family == "llama-3" else {"reasoning_content": "so"}
        prompt = renderer.render([{"role": "user", "content": "hi"}], [TOOL])
        for count in (1, 2) if syntax.parallel else (1,):
            calls = [call(call_id=f"functions.get:{index}") for index in range(count)]
            cases += [
                {
                    "family": f"{family} {count} {choice}",
                    "tokenizer": str(tmp_path / family / "tokenizer.json"),
                    "vocab_size": renderer.config.vocab_size,
                    "stop_ids": renderer.stop_ids,
                    "tag": constraint_of(renderer, [TOOL, PUT], choice).structural_tag,
                    "ids": sampled(renderer, prompt, told(None, *calls, **thought)),
                }
                for choice in ("required", allowed("get"), allowed("put"))
                if choice == "required" or syntax.marked(renderer)
            ]
    (tmp_path / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    command = [str(ENGINE_PYTHON), "-c", ACCEPT, str(tmp_path / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    refused = json.loads(done.stdout.splitlines()[-1])
    assert set(refused) == {each["family"] for each in cases if "'put'" in each["family"]}


def several(count: int, **bound: Any) -> Any:
    """Strings with this bound; a number grows with each of them, so that no two are the same."""
    grown = [
        {name: value + index if isinstance(value, int) else value for name, value in bound.items()}
        for index in range(count)
    ]
    properties = {f"f{index}": {"type": "string", **each} for index, each in enumerate(grown)}
    return {"type": "object", "properties": properties, "required": list(properties)}


COSTLY: dict[str, Callable[[int], Any]] = {
    "one length": lambda n: several(1, maxLength=n),
    "many lengths": lambda n: several(n, maxLength=9),
    "many long lengths": lambda n: several(n, minLength=3, maxLength=1_000_000),
    "shortest lengths": lambda n: several(n, minLength=40),
    "templates": lambda n: several(n, format="uri-template"),
    "a pattern": lambda n: {"type": "string", "pattern": f"^([^-]{{9}}-){{{min(n, 128)}}}$"},
    "an ambiguous pattern": lambda n: {"type": "string", "pattern": f"([a-z]{{1,{n}}}|x){{1,{n}}}"},
    "counted properties": lambda n: several(4 * n) | {"required": [], "minProperties": n},
}
"""Strict schemas that cost more, the larger the number is."""


def largest(make: Callable[[int], Any], vocab_size: int) -> str:
    """The grammar of the largest schema of this kind that is taken; "" if none is."""
    taken, number = "", 1
    while number < 100_000:
        form = JsonFormat(json_schema=make(number), origin=FormatOrigin("response_format", strict=True))
        try:
            check_schema(form.json_schema, "response_format", strict=True)
            kept = fitted(form, vocab_size).form
        except InvalidRequest:
            break
        taken = msgspec.json.encode(StructuralTag(format=kept)).decode()
        number += 1 + number // 8
    return taken


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [4000, 150_000])
def test_the_costliest_grammars_that_are_taken_compile_in_seconds(vocab_size: int) -> None:
    """The estimate of patterns is not exact, and processors differ."""
    tags = {kind: tag for kind, make in COSTLY.items() if (tag := largest(make, vocab_size))}
    assert COSTLY.keys() - tags.keys() <= {"many long lengths"}, (
        "two long strings cost less than a second each"
    )
    command = [str(ENGINE_PYTHON), "-P", str(ROOT / "bench" / "grammars.py"), str(vocab_size)]
    done = subprocess.run(
        command, input=json.dumps([*tags.values()]), capture_output=True, text=True, check=True
    )
    took_s = dict(zip(tags, (each for (each,) in json.loads(done.stdout)), strict=True))
    assert max(took_s.values()) < 4 * MOST_S, took_s


ACCEPT = """
import json, sys, xgrammar
from transformers import PreTrainedTokenizerFast

refused = {}
for case in json.load(open(sys.argv[1])):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=case["tokenizer"])
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=case["vocab_size"], stop_token_ids=case["stop_ids"]
    )
    grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(case["tag"])
    matcher = xgrammar.GrammarMatcher(grammar)
    taken = next((n for n, each in enumerate(case["ids"]) if not matcher.accept_token(each)), None)
    if taken is not None:
        refused[case["family"]] = tokenizer.decode(case["ids"][:taken + 1])
print(json.dumps(refused))
"""
"""A script for the Python of SGLang's environment, which has the grammar library."""
