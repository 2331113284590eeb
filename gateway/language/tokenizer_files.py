"""Reads the files of a model's tokenizer: tokenizer.json, and what others say beside it.

tokenizer.json ──▶ Tokenizer ◀── tokens that only tokenizer_config.json or older files name
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from rollout_queue.model_files import BrokenWeights, json_object

TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_SETTINGS_BYTES = 2**26
"""The size of a tokenizer_config.json; those with thousands of added tokens have a few megabytes."""


def tokenizer_of(model_path: Path) -> Tokenizer:
    """The tokenizer of a model's directory: it gives the ids that `AutoTokenizer` of transformers gives.

    A `truncation` or `padding` in tokenizer.json is left over from training, and is not used. Raises
    SystemExit if there is no tokenizer.json, or if it cannot be read.
    """
    file = model_path / "tokenizer.json"
    if not file.is_file():
        raise SystemExit(
            f"{file} does not exist: write it with AutoTokenizer.from_pretrained({str(model_path)!r})"
            f".save_pretrained({str(model_path)!r}) of transformers, or copy it from the base model"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise SystemExit(f"{file} is not a tokenizer that the library `tokenizers` reads: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_configured(tokenizer, tokenizer_settings(model_path))
    return tokenizer


def tokenizer_settings(model_path: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json, empty if there is none. Raises SystemExit if it is not JSON."""
    settings = object_in(model_path / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    settings |= object_in(model_path / "special_tokens_map.json")  # older models name tokens there
    special = {*named_tokens(settings).values(), *_listed_tokens(settings)}
    ids = object_in(model_path / "added_tokens.json")
    older = {
        str(at): {"content": text, "normalized": False, "special": text in special}
        for text, at in ids.items()
    }
    return settings | {"added_tokens_decoder": older}


def object_in(file: Path) -> dict[str, Any]:
    """The JSON object in a file, empty if there is none. Raises SystemExit if the file cannot be read."""
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_SETTINGS_BYTES:
        raise SystemExit(f"{file} has more than {MAX_SETTINGS_BYTES} bytes")
    try:
        return json_object(file)
    except BrokenWeights as error:
        raise SystemExit(f"{file.parent}: {error}") from error


def named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The tokens that tokenizer_config.json names, such as `bos_token`. Templates use these names."""
    extra = settings.get("extra_special_tokens")
    named = settings | (extra if isinstance(extra, dict) else {})
    contents = {name: _content_of(token) for name, token in named.items() if name.endswith("_token")}
    return {name: content for name, content in contents.items() if content}


def _listed_tokens(settings: dict[str, Any]) -> list[str]:
    """The further special tokens, which have no names."""
    lists = (settings.get(name) for name in ("additional_special_tokens", "extra_special_tokens"))
    contents = (_content_of(token) for listed in lists if isinstance(listed, list) for token in listed)
    return [content for content in contents if content]


def _content_of(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_configured(tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json declares, as transformers does when it loads both files.

    A token without an id stays text: the model has no row for it.
    """
    known = {token.content: repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, token in _declared(settings.get("added_tokens_decoder")):
        has = tokenizer.token_to_id(token.content)
        fits = token_id == (tokenizer.get_vocab_size() if has is None else has)
        if fits and known.get(token.content) != repr(token):
            tokenizer.add_tokens([token])
            known[token.content] = repr(token)
    for text in (*named_tokens(settings).values(), *_listed_tokens(settings)):
        if text not in known and tokenizer.token_to_id(text) is not None:
            tokenizer.add_tokens([AddedToken(text, special=True)])


def _declared(listed: Any) -> list[tuple[int, AddedToken]]:
    """The tokens of `added_tokens_decoder` by id, in order."""
    found = []
    for token_id, fields in listed.items() if isinstance(listed, dict) else ():
        if token_id.isdecimal() and isinstance(fields, dict) and isinstance(fields.get("content"), str):
            flags = {name: bool(fields[name]) for name in TOKEN_FLAGS if name in fields}
            found.append((int(token_id), AddedToken(fields["content"], **flags)))
    return sorted(found, key=lambda each: each[0])
