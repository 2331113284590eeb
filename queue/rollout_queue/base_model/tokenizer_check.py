"""The row about a model's tokenizer: the ids of texts that tokenizers disagree about, as a digest."""

import hashlib
from collections.abc import Callable, Iterator, Sequence

from rollout_queue.protocol.model_checks import ModelCheck

TOKENIZER = "tokenizer"
"""The row whose detail is the same for gateway and trainer if both make the same ids of the same texts."""
LONG = "The quick brown fox, aged 27, doesn't jump over 3 lazy dogs. " * 500
"""A tokenizer.json that cuts cuts it."""
TEXTS = (
    LONG,
    "",
    " ",
    "  two spaces before,  two between, and after  ",
    "\ttabs\t\n\n\nlines \r\n of\r all kinds\n \n",
    "I'm you'll WE'RE it\u2019s can't",
    "1 12 123 1234 12345678901 3.14 1,000,000 \u0663\u0664 \u2168 \u00bd",
    "caf\u00e9 cafe\u0301 \u212b \ufb01 \uff21 na\u00efve Stra\u00dfe \u0130stanbul",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f",
    "\uc548\ub155 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f469\u200d\U0001f4bb \U0001f1eb\U0001f1f7 \u2764\ufe0f \U0001d54f",
    "a\u00a0b\u2003c\u200bd\ufeffe\u2028f\u0085g \u2581 \u0120 ##x",
    "\x00\x01\x1b[0m\x7f",
    "def f(x):\n    return {'a': [x**2, \"b\\n\"]}  # <b>&amp;</b>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa================\n----------------",
)


def tokenizer_check(encode: Callable[[str, bool], Sequence[int]], added: Sequence[str]) -> ModelCheck:
    """`encode` gives the ids of a text, with or without the tokens that a prompt begins and ends with.
    `added` are the texts of the tokens that were added to the vocabulary."""
    digest, count = hashlib.sha256(), 0
    for text in _texts(added):
        for framed in (False, True):
            ids = list(encode(text, framed))
            digest.update(f"{ids}\n".encode())
            count += len(ids)
    detail = (
        f"{len(TEXTS)} texts and {len(added)} added tokens are {count} ids, digest {digest.hexdigest()[:8]}"
    )
    return ModelCheck(check=TOKENIZER, outcome="right", detail=detail)


def _texts(added: Sequence[str]) -> Iterator[str]:
    yield from TEXTS
    yield "".join(f"a {each} b{each}" for each in sorted(added))
