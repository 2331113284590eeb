"""A bare `tokenizers` tokenizer in the shape that `renderers` asks for: no transformers, no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class BareTokenizer:
    """Text to ids and back with the model's own tokenizer.json."""

    def __init__(self, model_path: Path, eos_token_id: int | None) -> None:
        self.backend = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self.name_or_path = str(model_path)
        self.eos_token_id = eos_token_id
        self.unk_token_id: int | None = None
        self.added_ids = frozenset(self.backend.get_added_tokens_decoder())
        """Ids of control tokens: `<|im_end|>`, `<tool_call>` and the like, never ordinary text."""

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]
