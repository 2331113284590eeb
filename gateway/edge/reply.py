"""Writes the reply to one client: one whole body, or a stream of server-sent events, and their headers.

`Reply.write` sends events of the answer to the client; what it calls is the `send` of ASGI.

A heartbeat here is an event that clients ignore: it keeps proxies from closing a silent stream. JSON is kept
on one line for clients that split texts as Python does, such as those that use httpx.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import msgspec
from starlette.types import Message, Send
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.counters import CLIENT_LEFT, CallFigures
from gateway.dialects.fields import MOST_HEADER_CHARS, ignored_header
from gateway.generations.generation import Generation
from gateway.language.deltas import AnswerStream, BegunAnswerStream, RawTextStream, StoppedStream
from gateway.parts import GatewayParts
from rollout_queue import clock
from rollout_queue.contract.packed_tokens import TokenIds

LINE_ENDS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)
"""Characters in UTF-8 that JSON need not escape, and that Unicode calls the end of a line."""


def one_line(encoded: bytes) -> bytes:
    """Lines of JSON, or events of it, with the characters of LINE_ENDS escaped."""
    if encoded.isascii():
        return encoded
    for raw, escaped in LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


Headers = Mapping[str, str]

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Reply:
    """The reply to one call."""

    def __init__(
        self,
        send: Send,
        request_id: str,
        figures: CallFigures,
        *,
        last: bool = False,
        flow: FlowControl | None = None,
    ) -> None:
        """`last`: the connection closes after the reply. `flow`: the connection's, if it is known."""
        self._send, self._flow = send, flow
        self.figures = figures
        self._own_headers = [
            (b"x-request-id", request_id.encode()),
            (b"request-id", request_id.encode()),  # read by Anthropic's clients
        ]
        if last:
            self._own_headers.append((b"connection", b"close"))
        self.more_headers: Callable[[], Headers] = dict
        """Headers of the caller's limits, as of the moment at which the reply begins."""
        self.status = CLIENT_LEFT
        """The status that was sent."""
        self.begun = False
        """Whether a status was sent. An error after that can only be an event of the stream."""
        self._open = False
        """Whether the stream's head is written."""
        self._heartbeats: tuple[bytes, float, Callable[[], Headers | None]] | None = None
        """The event, the seconds between two, and the headers of a stream that begins with one."""
        self._timer: clock.Timer | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._made_at = clock.monotonic()
        self._written_at = self._answered_at = 0.0
        """When the last bytes were written, and when the last event of the answer was; 0 for never."""

    async def send_json(self, status: int, body: bytes, headers: Headers) -> None:
        """Answer with one JSON body."""
        self.stop_heartbeat()
        self.begun = True
        fixed = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._start(status, [*fixed, *_encoded(headers), *self._own_headers])
        await self._send({"type": "http.response.body", "body": body})

    async def open_stream(self, headers: Headers) -> None:
        """Begin a stream of server-sent events, with 200."""
        self.begun = True
        await self._start(200, [*STREAM_HEADERS, *_encoded(headers), *self._own_headers])
        self._open = True

    @property
    def writable(self) -> bool:
        """Whether the connection takes events of the answer at once."""
        return self._open and self._flow is not None and not self._flow.write_paused

    def write_now(self, events: bytes) -> None:
        """`write`, while the reply is `writable`: then nothing is awaited."""
        writing = self.write(events)
        try:
            writing.send(None)
        except StopIteration:
            return
        writing.close()
        raise RuntimeError("a connection that takes events at once made its writer wait")

    async def write(self, events: bytes) -> None:
        """Write whole events of the answer to an open stream."""
        now = clock.monotonic()
        if self._answered_at:
            self.figures.gaps.add(now - self._answered_at)
        else:
            self.figures.first_token.add(now - self._made_at)
        self._written_at = self._answered_at = now
        await self._send({"type": "http.response.body", "body": one_line(events), "more_body": True})

    async def close(self, events: bytes = b"") -> None:
        """Write the last events and the end of the body in one message, since clients wait for the end."""
        if self._timer is not None:
            self._timer.cancel()
        if self._heartbeat is not None:
            await self._heartbeat  # it may still be writing to a slow socket
        await self._send({"type": "http.response.body", "body": one_line(events)})

    async def repeat(self, message: Message) -> None:
        """Send a message that was recorded from another reply, with this reply's request id."""
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            self.figures.statuses[self.status] += 1
            own = {name for name, _ in self._own_headers}
            headers = [header for header in message["headers"] if header[0] not in own]
            message = {**message, "headers": [*headers, *self._own_headers]}
        await self._send(message)

    def keep_alive(self, heartbeat: bytes, every_s: float, headers: Callable[[], Headers | None]) -> None:
        """Write a heartbeat whenever nothing was written for `every_s` seconds, until `stop_heartbeat`.

        If a heartbeat is due and the stream has not begun, it is opened with the headers that `headers`
        returns. While `headers` returns None, nothing is written.
        """
        self._written_at, self._heartbeats = clock.monotonic(), (heartbeat, every_s, headers)
        self._timer = clock.call_later(every_s / 2, self._check_silence)

    def _check_silence(self) -> None:
        if (heartbeats := self._heartbeats) is None:
            return
        heartbeat, every_s, headers = heartbeats
        silent = clock.monotonic() - self._written_at >= every_s
        if silent and (self._heartbeat is None or self._heartbeat.done()):
            self._heartbeat = asyncio.create_task(self._write_heartbeat(heartbeat, headers))
        self._timer = clock.call_later(every_s / 2, self._check_silence)

    async def _write_heartbeat(self, heartbeat: bytes, headers: Callable[[], Headers | None]) -> None:
        if not self.begun:
            if (own := headers()) is None:
                return
            await self.open_stream(own)
        self._written_at = clock.monotonic()
        await self._send({"type": "http.response.body", "body": heartbeat, "more_body": True})

    def stop_heartbeat(self) -> None:
        """Write none any longer. After this, the reply refers to nothing that refers to it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._timer = self._heartbeat = self._heartbeats = None

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.figures.statuses[status] += 1
        headers += _encoded(self.more_headers())
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _encoded(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


NEAR = 0.8
"""The share of the trainer's bound of a row from which on replies have the header `x-weir-row-tokens`."""


Stream = AnswerStream | RawTextStream | BegunAnswerStream | StoppedStream


def answer_stream(gateway: GatewayParts, generation: Generation) -> Stream:
    stream, stops = _whole_stream(gateway, generation), generation.call.stop
    return StoppedStream(stream, gateway.renderer.tokenizer, stops) if stops else stream


def _whole_stream(
    gateway: GatewayParts, generation: Generation
) -> AnswerStream | RawTextStream | BegunAnswerStream:
    """The deltas of all tokens, those of a stop string included."""
    call = generation.call
    if call.prompt_ids is not None:
        return RawTextStream(gateway.renderer)
    prompt_ids, begun = generation.prompt.prompt_ids, generation.prompt.begun
    asked = TokenIds(prompt_ids[:-begun]) if begun else prompt_ids
    renderer = gateway.renderer.variant(call.thinking)
    whole = AnswerStream(renderer, call.tools, generation.turn_id, asked)
    return BegunAnswerStream(whole, prompt_ids[-begun:], call.begun) if begun else whole


def opening_headers(generations: Sequence[Generation]) -> dict[str, str] | None:
    """The headers of a stream that begins with a heartbeat; None until an engine works on an answer."""
    return reply_headers(generations) if any(each.at_engine for each in generations) else None


def reply_headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Headers that name the session, the turns, the policy version and the sampling of the answers, and how
    near the prompt, with the answer so far, is to the trainer's bound of a row."""
    first = generations[0]
    tokens = max(len(each.prompt.prompt_ids) + len(each.ids) for each in generations)
    near = first.max_row_tokens is not None and tokens >= NEAR * first.max_row_tokens
    return {
        **({"x-weir-row-tokens": f"{tokens} of {first.max_row_tokens}"} if near else {}),
        "x-weir-session-id": first.head.spec.shown_id,
        "x-weir-turn-id": ",".join([generation.turn_id for generation in generations]),
        "x-weir-policy-version": str(first.versions[0].version) if first.versions else "",
        "x-weir-sampling": _header_json(first.sampling.used),
        "x-weir-sampling-asked": _header_json(first.sampling.asked),
        **ignored_header(first.call.ignored_fields),
    }


def _header_json(parameters: Mapping[str, Any]) -> str:
    """The parameters as JSON. A long `logit_bias` becomes null, because clients refuse long headers."""
    text = msgspec.json.encode(parameters).decode()
    if len(text) <= MOST_HEADER_CHARS:
        return text
    return msgspec.json.encode({**parameters, "logit_bias": None}).decode()


P = ParamSpec("P")

LOOP_LOGPROBS = 1024
"""A reply with more log-probabilities is written in a thread, because each takes a microsecond or two."""


async def written(
    generations: Sequence[Generation], write: Callable[P, bytes], *args: P.args, **kwargs: P.kwargs
) -> bytes:
    """Call `write`, which writes the whole answers of these generations; return its result."""
    if sum(map(_logprobs, generations)) <= LOOP_LOGPROBS:
        return write(*args, **kwargs)
    return await asyncio.to_thread(write, *args, **kwargs)


def _logprobs(generation: Generation) -> int:
    tops = generation.top_logprobs
    return len(generation.ids) * (1 + (len(tops[-1]) if tops else 0))
