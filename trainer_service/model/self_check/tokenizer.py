"""The row about the tokenizer, by which `weir doctor` compares transformers with the gateway."""

from pathlib import Path

from rollout_queue.base_model.tokenizer_check import TOKENIZER, tokenizer_check
from rollout_queue.protocol.model_checks import ModelCheck


def transformers_check(model_path: Path) -> ModelCheck:
    """The ids that `AutoTokenizer` makes. The trainer needs no tokenizer for anything else."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]

        def encode(text: str, framed: bool) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=framed, verbose=False)
            return ids

        return tokenizer_check(encode, added)
    except Exception as error:  # whatever the tokenizer's code raises
        first = (str(error).splitlines() or [""])[0]
        detail = (
            f"transformers cannot load it, so nothing compares the gateway's: {type(error).__name__}: {first}"
        )
        return ModelCheck(check=TOKENIZER, outcome="unknown", detail=detail)
