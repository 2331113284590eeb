"""Lets a renderer of the library write one pad for each image, whatever its size."""

from collections.abc import Sequence
from typing import Any


class OnePadTemplate:
    """The same renderer, for messages with images. For more pads, it would need the model's processor."""

    def __init__(self, template: Any) -> None:
        self._template = template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._template, name)

    def render_ids(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """As the renderer's own."""
        rendered: list[int] = self._template.render(messages, process_multimodal=False, **options).token_ids
        return rendered

    def bridge_to_next_turn(self, *arguments: Any, **options: Any) -> Any:
        """As the renderer's own."""
        return self._template.bridge_to_next_turn(*arguments, process_multimodal=False, **options)
