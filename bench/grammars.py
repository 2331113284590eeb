"""What the parts of a schema cost the engine's grammar compiler: CPU seconds, by the size of the vocabulary.

.venv-engine/bin/python -P bench/grammars.py 4000 150000     the table of docs/performance.md
.venv-engine/bin/python -P bench/grammars.py 4000 < tags     the figure of each structural tag of a JSON list

`gateway/language/grammar_cost.py` has what follows from it. The vocabulary is made: words of syllables with
and without a space before them, Chinese and Cyrillic ones, signs, and all bytes. One
thread compiles each case, in a process of its own that is ended after LIMIT_S.
"""

import importlib
import json
import os
import random
import resource
import sys
import time
from typing import Any

LIMIT_S = 60
ONSETS = "b c d f g h j k l m n p r s t v w z st tr ch sh pr gr th".split()  # noqa: SIM905
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou")
CODAS = ("", "", "", "n", "r", "s", "t", "l", "ng", "nd", "st", "ck")
STRING: Any = {"type": "string"}


def vocabulary(size: int) -> list[bytes]:
    """The tokens: the bytes first, then texts in random order, always the same."""
    chance = random.Random(0)
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(found) < size:
        found[_token(chance).encode()] = None
    return list(found)[:size]


def _token(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.78:
        word = "".join(
            chance.choice(ONSETS) + chance.choice(VOWELS) + chance.choice(CODAS)
            for _ in range(chance.choices([1, 2, 3, 4], [2, 5, 4, 1])[0])
        )
        word = word.capitalize() if chance.random() < 0.2 else word
        return f" {word}" if chance.random() < 0.65 else word
    if kind < 0.93:
        return "".join(chr(chance.randint(0x4E00, 0x9F00)) for _ in range(chance.randint(1, 4)))
    if kind < 0.97:
        return "".join(chr(chance.randint(0x430, 0x44F)) for _ in range(chance.randint(2, 8)))
    return "".join(chance.choice("!\"#$%&'()*+,-./:;<=>?@[]{}~ \n\t0123456789") for _ in range(4))


def object_of(**properties: Any) -> Any:
    return {"type": "object", "properties": properties, "required": list(properties)}


def several(count: int, **bound: Any) -> Any:
    """An object of strings with these bounds."""
    return object_of(**{f"f{index}": STRING | bound for index in range(count)})


CASES: dict[str, Any] = {
    "10 plain strings": several(10),
    "900 plain strings": several(900),
    "900 optional strings": several(900) | {"required": []},
    "60 optional strings, at most 40": several(60) | {"required": [], "maxProperties": 40},
    "maxLength 10": several(1, maxLength=10),
    "maxLength 20": several(1, maxLength=20),
    "maxLength 20, three times": several(3, maxLength=20),
    "maxLength 100": several(1, maxLength=100),
    "maxLength 1000000": several(1, maxLength=1_000_000),
    "minLength 1000": several(1, minLength=1000),
    "maxItems 1000000": object_of(a={"type": "array", "items": STRING, "maxItems": 1_000_000}),
    "minItems 1000000": object_of(a={"type": "array", "items": STRING, "minItems": 1_000_000}),
    "a range of numbers": object_of(n={"type": "number", "minimum": -1234.5, "maximum": 98765.4}),
    "4000 values of an enum": {"enum": [f"value-{index}" for index in range(4000)]},
    "format date-time": several(1, format="date-time"),
    "format email": several(1, format="email"),
    "format email, 100 times": several(100, format="email"),
    "format uri": several(1, format="uri"),
    "format hostname": several(1, format="hostname"),
    "format uri-template": several(1, format="uri-template"),
    "format uri-template, 10 times": several(10, format="uri-template"),
    "pattern [a-z]{20}": several(1, pattern="^[a-z]{20}$"),
    "pattern .{20}": several(1, pattern="^.{20}$"),
    "pattern ([a-z]{1,9}-){1,9}": several(1, pattern="^([a-z]{1,9}-){1,9}$"),
    "pattern ([a-z]{1,5}){1,5}": several(1, pattern="^([a-z]{1,5}){1,5}$"),
}


def tag_of(schema: Any) -> str:
    form = {"type": "json_schema", "json_schema": schema, "style": "json", "max_whitespace_cnt": 16}
    return json.dumps({"type": "structural_tag", "format": form})


def measured(info: Any, tag: str) -> float:
    """The CPU seconds of one compilation; infinite if it was ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        began = time.process_time()
        compiler = importlib.import_module("xgrammar").GrammarCompiler(info, max_threads=1)
        compiler.compile_structural_tag(tag)
        os.write(writer, str(time.process_time() - began).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        if status == 0:
            return float(answer.read())
    if os.WIFSIGNALED(status):
        return float("inf")
    raise SystemExit(f"the engine's library does not compile {tag[:200]}")


def main() -> None:
    xgrammar = importlib.import_module("xgrammar")
    sizes = [int(size) for size in sys.argv[1:]] or [4000, 150_000]
    infos = [
        xgrammar.TokenizerInfo(vocabulary(size), xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[0])
        for size in sizes
    ]
    if not sys.stdin.isatty() and (given := sys.stdin.read().strip()):
        print(json.dumps([[measured(info, tag) for info in infos] for tag in json.loads(given)]))
        return
    print("| |", " | ".join(f"{size} tokens" for size in sizes), "|\n|---|" + "--:|" * len(sizes))
    for name, schema in CASES.items():
        figures = (f"{measured(info, tag_of(schema)):.2f}" for info in infos)
        print(f"| {name} |", " | ".join(figures), "|", flush=True)


if __name__ == "__main__":
    main()
