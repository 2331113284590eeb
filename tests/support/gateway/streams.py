"""Reads streams of server-sent events, in any dialect."""

import json


def text_of(lines: list[str]) -> tuple[str, int]:
    """The text of a stream in any dialect, and how many log-probabilities it has."""
    text, logprobs = "", 0
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("type") == "content_block_delta":
            text += event["delta"].get("text", "")
        elif event.get("type") == "response.output_text.delta":
            text += event["delta"]
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            told = choice.get("logprobs") or {}
            logprobs += len(told.get("content") or told.get("token_logprobs") or ())
    return text, logprobs
