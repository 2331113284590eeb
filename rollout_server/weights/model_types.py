"""What transformers assumes of a type of model where config.json is silent, read from its source.

Importing a configuration of transformers imports torch: seconds, and memory that this process keeps.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def tied_by_default(model_type: object) -> bool | None:
    """Whether models of this type take the embedding as their output head; None if that is not known."""
    marker = f'model_type = "{model_type}"'
    for path in _configurations():
        text = path.read_text(encoding="utf-8")
        if marker in text:
            classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
            of_type = (each for each in classes if _value(each, "model_type") == model_type)
            value = next((_value(each, "tie_word_embeddings") for each in of_type), None)
            return value if isinstance(value, bool) else None
    return None


def _configurations() -> Iterator[Path]:
    found = importlib.util.find_spec("transformers")
    for location in (found.submodule_search_locations or ()) if found is not None else ():
        yield from sorted(Path(location).glob("models/*/configuration_*.py"))


def _value(of: ast.ClassDef, name: str) -> object:
    """What the class assigns to this attribute; None without a plain value."""
    for node in of.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return node.value.value
    return None
