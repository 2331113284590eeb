"""The sampling of an engine double: the log-probability of each token tells which weights sampled it."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.support.gateway.fake_engine import said_already
from tests.support.rollout_server.fakes import FakeEngine


def logprob_of_weights(directory: Path) -> float:
    """The log-probability that these weights give every token; exact in float32. Weights that differ have
    different ones, but for one pair in 65,536."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return -(1 + int.from_bytes(digest.digest()[:2], "little")) / 2**16


class WeightsSampler:
    """Answers every prompt with `hello`, or with an adapter `hello from` its name. Its answers wait while the
    engine is paused, and go on afterwards with the weights that it has then, or are aborted, as SGLang's are.
    The engine dies if it has no weights then: `die` does not return."""

    def __init__(
        self,
        engine: FakeEngine,
        tokenizer: Tokenizer,
        pace_s: Callable[[], float],
        die: Callable[[], Awaitable[object]],
    ) -> None:
        self._engine, self._pace_s, self._die = engine, pace_s, die
        self._tokenizer = tokenizer
        self._logprob = 0.0
        self.note_weights()

    def note_weights(self) -> None:
        """The engine has loaded weights."""
        self._logprob = logprob_of_weights(self._engine.directory)

    async def events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The events of one answer. A prompt that ends with the beginning of the answer gets the rest."""
        engine, adapter = self._engine, body.get("lora_path")
        own = None if adapter is None else logprob_of_weights(engine.adapters[adapter])
        words = "hello" if adapter is None else f"hello from {adapter}"
        whole = [*self._tokenizer.encode(words).ids, *self._tokenizer.encode("<|im_end|>").ids]
        ids = whole[said_already(body["input_ids"], whole) :]
        aborts = engine.aborts
        limit, reason = body["sampling_params"]["max_new_tokens"], {"type": "stop", "matched": whole[-1]}
        if len(ids) > limit:
            ids, reason = ids[:limit], {"type": "length", "length": limit}
        spans: list[dict[str, Any]] = []
        for end, token in enumerate(ids, 1):
            await asyncio.sleep(self._pace_s())  # the time that a token takes
            while engine.paused:  # noqa: ASYNC110 - another request resumes the engine
                await asyncio.sleep(0.01)  # until it is resumed
            if engine.released or engine.garbage:
                await self._die()
            version = engine.version
            if engine.aborts != aborts:
                yield _aborted(version, spans, end - 1)
                return
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": end - 1})
            spans[-1]["end"] = end
            meta: dict[str, Any] = {
                "completion_tokens": end,
                "cached_tokens": 0,
                "finish_reason": None,
                "weight_version": version,
                "output_token_logprobs": [[self._logprob if own is None else own, token, None]],
            }
            if end == len(ids):
                meta |= {"finish_reason": reason, "weight_versions": spans}
            yield f"data: {json.dumps({'output_ids': [token], 'meta_info': meta})}\n\n".encode()
        yield b"data: [DONE]\n\n"


def _aborted(version: str, spans: list[dict[str, Any]], tokens: int) -> bytes:
    """The last event of an answer that the engine aborts. It brings no token."""
    meta = {
        "completion_tokens": tokens,
        "finish_reason": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        "weight_version": version,
        "weight_versions": spans,
        "output_token_logprobs": [],
    }
    return f"data: {json.dumps({'output_ids': [], 'meta_info': meta})}\n\ndata: [DONE]\n\n".encode()
