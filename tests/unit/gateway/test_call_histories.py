"""Whatever happens to a call, each client that follows it gets the whole answer, or the failure."""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.callers.identity import Caller
from gateway.counters import CallFigures
from gateway.edge.calls import CallKey, InFlightCall, InFlightCalls
from gateway.edge.reply import Reply
from gateway.edge.request import DisconnectWatch
from rollout_queue import clock
from rollout_queue.http.errors import ApiError
from tests.support.turned_clock import TurnedClock

KEY = CallKey(Caller("client", "client"), None, (), "digest")
GRACE_S = 5.0
CHOICES = 2
FAILED = ApiError(503, "the engine is gone")


@dataclass
class Tokens:
    """The tokens of one choice."""

    ids: list[int] = field(default_factory=list)
    top_logprobs: tuple[()] = ()
    at_engine: bool = False

    @property
    def text_tokens(self) -> int:
        return len(self.ids)


class Words:
    """Writes tokens as words: the number of the choice, a colon, the token."""

    heartbeat = b": "

    def opening(self) -> bytes:
        return b"begin "

    def piece(self, index: int, deltas: Sequence[int], tokens: range) -> bytes:
        assert len(deltas) == len(tokens)
        return b"".join(b"%d:%d " % (index, token) for token in deltas)

    def closing(self, index: int, recorded: Any) -> bytes:
        return b"%d:done " % index

    def ending(self) -> bytes:
        return b"end"

    def failing(self, error: ApiError) -> bytes:
        return b"failed"


class Texts:
    def feed(self, ids: Sequence[int]) -> Sequence[int]:
        return ids

    def finish(self, answer: object) -> Sequence[int]:
        return ()


class Client:
    """One client; its socket may be full."""

    def __init__(self, known: bool) -> None:
        """`known`: the gateway knows when the socket is full, so it may write at once."""
        self._known = known
        self.words = b""
        self.ended = self.left = False
        self.failure: ApiError | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def write_paused(self) -> bool:
        return not self.writable.is_set()

    async def send(self, message: Any) -> None:
        if self.write_paused:
            await self.writable.wait()
        self.words += message.get("body", b"")
        self.ended |= message["type"] == "http.response.body" and not message.get("more_body", False)

    def follow(self, call: InFlightCall) -> None:
        self._task = asyncio.create_task(self._follow(call))

    async def _follow(self, call: InFlightCall) -> None:
        flow = cast(Any, self) if self._known else None
        reply = Reply(self.send, "", CallFigures("chat"), flow=flow)
        try:
            await call.follow(reply)
        except ApiError as error:
            self.failure = error.with_traceback(None)
        finally:
            reply.stop_heartbeat()
            self._task = None  # it would keep the error with which it ends

    def leave(self) -> None:
        if self._task is not None:
            self.left = True
            self._task.cancel()

    @property
    def follows(self) -> bool:
        return self._task is not None


class History:
    """A call, its clients, and what was done to it."""

    def __init__(self, turned: TurnedClock, known: bool) -> None:
        self.turned, self.known = turned, known
        self.calls = InFlightCalls(GRACE_S, join_identical=True)
        self.tokens = [Tokens() for _ in range(CHOICES)]
        self.steps: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.done = set[int]()
        self.cancelled = self.waits = False
        self.clients = [Client(known)]
        watch = DisconnectWatch(cast(Any, None))
        call = self.calls.begin(KEY, 0, CallFigures("chat"), watch, self.make)
        self.call = ref(call)
        self.clients[0].follow(call)

    async def make(self, call: InFlightCall) -> None:
        responder = SimpleNamespace(events=lambda generations: Words())
        gateway = SimpleNamespace(settings=SimpleNamespace(heartbeat_s=1e6))
        parsed = SimpleNamespace(responder=responder)
        recorded = call.stream_as(cast(Any, gateway), cast(Any, parsed), cast(Any, self.tokens))
        try:
            while len(self.done) < CHOICES:
                step, index = await self.steps.get()
                if step == "fail":
                    raise ApiError(FAILED.status, FAILED.message)
                if index in self.done:
                    continue
                if step == "append":
                    self.tokens[index].ids.append(len(self.tokens[index].ids))
                else:
                    await call.wait_for_reader()
                    recorded[index] = cast(Any, SimpleNamespace(answer=None))
                    self.done.add(index)
                if step != "append":
                    call.wake()
                elif (caught_up := call.appended()) is not None:
                    self.waits = True
                    await caught_up()
                    self.waits = False
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def take(self, step: str, which: int) -> None:
        client = self.clients[which % len(self.clients)]
        call = self.call()
        if step in ("append", "finish", "fail"):
            self.steps.put_nowait((step, which % CHOICES))
        elif step == "join" and call is not None and not call.ended:
            joined = self.calls.join(KEY, 1)
            if joined is not None:
                self.clients.append(Client(self.known))
                self.clients[-1].follow(joined)
        elif step == "fill":
            client.writable.clear()
        elif step == "empty":
            client.writable.set()
        elif step == "leave":
            client.leave()
        elif step == "wait":
            self.turned.turn(GRACE_S)
        del call
        await settled()

    def check(self) -> None:
        call = self.call()
        following = [client for client in self.clients if client.follows]
        for client in self.clients:
            for index, tokens in enumerate(self.tokens):
                said = [word[2:] for word in client.words.split() if word.startswith(b"%d:" % index)]
                whole = [b"%d" % token for token in tokens.ids] + [b"done"] * (index in self.done)
                assert said == whole[: len(said)]
        if call is not None and not call.ended and len(following) > 1:
            assert not self.waits
        if len(following) == 1 and following[0].writable.is_set():
            assert not self.waits

    async def finish(self) -> None:
        for client in self.clients:
            client.writable.set()
        self.steps.put_nowait(("finish", 0))
        self.steps.put_nowait(("finish", 1))
        await settled()
        self.turned.turn(GRACE_S)
        await settled()
        await self.calls.close()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)  # all tasks that can go on do so


STEPS = ("append", "append", "append", "finish", "join", "fill", "empty", "leave", "wait", "fail")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=30), st.booleans())
@settings(max_examples=300, deadline=None)
def test_each_client_that_stays_gets_the_whole_answer_or_the_failure(
    taken: list[tuple[str, int]], known: bool
) -> None:
    async def play() -> None:
        turned = TurnedClock(stopped=True)
        with clock.using(turned):
            history = History(turned, known)
            await settled()
            for step, which in taken:
                await history.take(step, which)
                history.check()
            await history.finish()
            judge(history)

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gateway.edge.calls.answer_stream", lambda gateway, generation: Texts())
            patch.setattr("gateway.edge.calls.reply_headers", lambda generations: {})
            asyncio.run(play())
    finally:
        gc.enable()


def judge(history: History) -> None:
    if not any(client.left for client in history.clients):  # a deadline of the clock refers to itself
        assert history.call() is None, "it waits for the garbage collector"
    complete = len(history.done) == CHOICES
    for client in history.clients:
        if client.left:
            continue
        if complete:
            whole = [word for word in client.words.split() if word.endswith(b":done")]
            assert (len(whole), client.ended, client.failure) == (CHOICES, True, None)
            assert client.words.startswith(b"begin ")
            assert client.words.endswith(b"end")
            for index, tokens in enumerate(history.tokens):
                said = [word for word in client.words.split() if word.startswith(b"%d:" % index)]
                assert len(said) == len(tokens.ids) + 1
        else:
            assert client.words.endswith(b"failed") if client.words else client.failure is not None
    if history.cancelled:
        assert all(client.left for client in history.clients)


@pytest.mark.parametrize("known", [False, True])
async def test_a_client_that_takes_nothing_holds_the_sampling_back(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.edge.calls.answer_stream", lambda gateway, generation: Texts())
    monkeypatch.setattr("gateway.edge.calls.reply_headers", lambda generations: {})
    turned = TurnedClock(stopped=True)
    with clock.using(turned):
        history = History(turned, known)
        await settled()
        await history.take("append", 0)
        assert history.clients[0].words == b"begin 0:0 "
        await history.take("fill", 0)
        for _ in range(10):
            await history.take("append", 0)
        assert len(history.tokens[0].ids) == 3, "one that the socket does not take, and one more"
        await history.take("join", 0)
        assert len(history.tokens[0].ids) == 11
        assert history.clients[1].words.endswith(b"0:10 ")
        await history.take("fill", 1)
        for _ in range(10):
            await history.take("append", 0)
        assert len(history.tokens[0].ids) == 21, "of two clients none is waited for"
        await history.finish()
        assert history.clients[0].words.count(b"0:") == 22
