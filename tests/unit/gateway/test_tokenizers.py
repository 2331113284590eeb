"""The gateway's ids of a text are those of `AutoTokenizer`, for every kind of tokenizer, and any text."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from gateway.errors import InvalidRequest
from gateway.language.tokenizer import CUT, WINDOW, BareTokenizer, ControlTokenEscaper, at_most, split_at_cuts
from tests.support.hypothesis_profiles import examples

MARKS = ("<s>", "</s>", "<|im_end|>", "<tool_call>", "<mask>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
WORDS = (
    Path(json.__file__).read_text(encoding="utf-8") + "h\u00e9llo w\u00f6rld \u4f60\u597d \u4e16\u754c"
).splitlines()
ODD = (
    *(
        "\U0001f469\u200d\U0001f469\u200d\U0001f467",
        "\u4f60\u597d",
        "e\u0301",
        "\ufdd0",
        "\ufdd0\ufdd0",
        "\ufffd",
    ),
    *(
        "\x00",
        "\x7f",
        "\u2028",
        "\u0085",
        "\ufeff",
        "\u200b",
        "\r\n",
        "\t",
        "   ",
        "\u2581",
        "##ing",
        "A \u00c9",
    ),
    *(*MARKS, "<|im_end", "< s>", "<s><s>", " <mask> ", "<tool_call>\n", "<0x0A>", "<|im_end|> "),
)


def trained(model: Any, trainer: Any, pre: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def byte_level(normalizer: Any = None) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made = trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer)
    made.decoder = decoders.ByteLevel()
    return made


def metaspace(**how: Any) -> Tokenizer:
    """Byte-fallback BPE, as Llama 2's and Mistral's."""
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *MARKS[:2], *BYTES], show_progress=False
    )
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made = trained(model, trainer, pre_tokenizers.Metaspace(**how))
    # The bytes are no added tokens: only the model writes them.
    plain = json.loads(made.to_str())
    plain["added_tokens"] = plain["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(plain))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", *MARKS[:2]], unk_token="<unk>", show_progress=False
    )
    made = trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC())
    made.decoder = decoders.Metaspace()
    return made


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]"], show_progress=False)
    made = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(lowercase=True),
    )
    made.decoder = decoders.WordPiece()
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level,
    "byte-level BPE with NFC": lambda: byte_level(normalizers.NFC()),
    "byte-fallback BPE": metaspace,
    "byte-fallback BPE, one piece": lambda: metaspace(split=False, prepend_scheme="first"),
    "Unigram with NFKC": unigram,
    "WordPiece": word_piece,
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BareTokenizer, Any]:
    """The gateway's tokenizer and `AutoTokenizer` of a directory whose files have left-overs of training."""
    from transformers import AutoTokenizer

    directory, made = tmp_path_factory.mktemp("kind"), KINDS[request.param]()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS[:3]])
    made.add_tokens(
        [AddedToken("<tool_call>", rstrip=True), AddedToken("<mask>", lstrip=True, single_word=True)]
    )
    begin = made.token_to_id("<s>")
    if "BPE" in request.param:
        made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", begin)])
    made.enable_truncation(8)
    made.enable_padding(length=16, pad_id=begin, pad_token="<s>")
    made.save(str(directory / "tokenizer.json"))
    word = max((each for each in sorted(made.get_vocab()) if each.isascii() and each.isalpha()), key=len)
    late = {"content": "<|late|>", "lstrip": False, "rstrip": True, "normalized": False, "special": True}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": word,
        "added_tokens_decoder": {str(made.get_vocab_size()): late | {"single_word": False}},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return BareTokenizer(directory, None), AutoTokenizer.from_pretrained(directory)


TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from((*ODD, "<|late|>", "<|late|> x", " the ", "in the end", "\n\n")),
    ),
    max_size=12,
).map("".join)


@given(text=TEXTS, repeated=st.sampled_from((1, 1, 1, 3000)), whole=st.booleans())
@settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_a_text_has_the_ids_of_auto_tokenizer(
    both: tuple[BareTokenizer, Any], text: str, repeated: int, whole: bool
) -> None:
    ours, theirs = both
    text = (text.replace("the", theirs.eos_token) * repeated)[:100_000]
    ids = theirs.encode(text, add_special_tokens=whole)
    begin = theirs.encode("")  # what it adds: <s>, or nothing
    twice = whole and begin and ids[:2] == begin * 2  # the text has its own begin token
    assert ours.encode_alone(text, whole) == (ids[1:] if twice else ids)


@pytest.mark.parametrize(
    "text", ["all work and no play. " * 5000, "\u4f60\u597d\U0001f642" * 30_000, "a" * 100_000]
)
def test_a_long_text_is_neither_cut_nor_filled(both: tuple[BareTokenizer, Any], text: str) -> None:
    ours, theirs = both
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_a_model_without_a_tokenizer_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"tokenizer\.json does not exist: write it with AutoTokenizer"):
        BareTokenizer(tmp_path, None)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"tokenizer\.json is not a tokenizer"):
        BareTokenizer(tmp_path, None)


def test_tokens_that_only_older_files_name_are_those_of_auto_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made = byte_level()
    made.save(str(tmp_path / "tokenizer.json"))
    size = made.get_vocab_size()
    some = sorted(each for each in made.get_vocab() if len(each) > 2 and each.isascii())[:2]
    files: dict[str, Any] = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "added_tokens.json": {"<|late|>": size, "<later>": size + 1},
        "special_tokens_map.json": {"eos_token": "<|late|>", "additional_special_tokens": some},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    ours, theirs = BareTokenizer(tmp_path, None), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a <|late|> b", "x<later>y", f"x{some[0]}y {some[1]}", f"<|late|><later>{some[0]}"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    assert ours.special_ids == {size, *map(made.token_to_id, some)}


SOME_TOKENS = ("<|im_start|>", "<|im_end|>", "<|im_", "<s>", "</s>", "aa", "a<", "[INST]", ".*", "x" * 400)
PIECES = st.sampled_from([*SOME_TOKENS, "<|im", "|>", "<", "a", "x" * 399, CUT, "z" * WINDOW, "."])


@settings(max_examples=examples(100), deadline=None)
@given(st.sets(st.sampled_from(SOME_TOKENS)), st.lists(PIECES, max_size=12).map("".join))
def test_each_control_token_is_cut_wherever_it_begins(tokens: set[str], text: str) -> None:
    said = text.replace(CUT, CUT * 2)
    begins = [at for at in range(len(said)) if any(said.startswith(token, at) for token in tokens)]
    ends = [0, *(at + 1 for at in begins), len(said)]
    parts = [said[start:end] for start, end in pairwise(ends)]
    assert ControlTokenEscaper(tokens).cut(text) == CUT.join(parts)
    assert "".join(split_at_cuts(CUT.join(parts))) == text


@pytest.mark.parametrize("piece", ["<|im_", "<|im_end|>", "<|im_start|", "<", CUT, "<|im_end|> <|im_"])
def test_what_looks_like_control_tokens_costs_two_seconds_at_most(piece: str) -> None:
    """In 31 MB, of the time of this thread. It is cut only as far as the prompt may have tokens."""
    escaper = ControlTokenEscaper(["<|im_start|>", "<|im_end|>", *(f"<|reserved_{n}|>" for n in range(250))])
    text, began = piece * (31 * 2**20 // len(piece.encode())), time.thread_time()
    with suppress(InvalidRequest), at_most(2**18, 2**17, "messages"):
        escaper.cut(text)
    assert time.thread_time() - began < 2
