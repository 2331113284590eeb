"""Calls the tools of MCP servers, over stdin and stdout, in the Python environment of the package `mcp`.

request  {"id": 7, "do": "call", "episode": "3", "with": {"server": "files", "name": "read", …}}
answer   {"id": 7, "ok": {"text": "…"}}   or   {"id": 7, "error": "TimeoutError: …"}

`start` brings the servers; `open` connects an episode to each of them and lists their tools; `close` ends the
connections, and with them the processes of servers that are commands. Requests are answered side by side.
"""

import asyncio
import json
import os
import sys
import threading
import traceback
from contextlib import AsyncExitStack
from typing import Any

from host_answers import MOST_ERROR, answered, failed, write_all
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

MOST_TEXT = 2**18
"""The most characters of a result; the rest is cut off."""
MOST_PAGES = 100
"""The most pages of a server's list of tools."""
OF_THE_CALLER = (-32602, -32601)
"""JSON-RPC's codes of a call that is wrong: its arguments, or its tool. The model reads the error."""
CLOSES_WITHIN_S = 10.0
"""How long the servers of an episode may take to end."""
STOPS_WITHIN_S = 20.0
"""How long the servers may take to stop after the runner has ended."""


class Connections:
    """One episode's connections. They are opened and closed by one task, as the library demands."""

    def __init__(self, servers: dict[str, dict[str, Any]]) -> None:
        self._servers = servers
        self._clients: dict[str, Client] = {}
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def opened(self) -> list[dict[str, Any]]:
        """The tools of all servers: `{"server", "name", "description", "parameters"}`."""
        return await asyncio.shield(self._opened)

    async def call(self, server: str, name: str, arguments: dict[str, Any]) -> str:
        """What the tool returned, as text. Raises what makes the server unusable."""
        try:
            result = await self._clients[server].call_tool(name, arguments)
        except MCPError as error:
            if error.error.code in OF_THE_CALLER:
                return f"error: {error.error.message}"
            raise
        text = bounded("\n".join(shown(block) for block in result.content))
        return f"error: {text}" if result.is_error and not text.lower().startswith("error") else text

    async def close(self) -> None:
        """End the connections. A server that does not let go is left to the end of this program."""
        self._closing.set()
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSES_WITHIN_S)

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                tools: list[dict[str, Any]] = []
                for name, server in self._servers.items():
                    client = await stack.enter_async_context(await connected(server, stack))
                    self._clients[name] = client
                    tools += [{"server": name, **each} for each in await tools_of(client)]
                self._opened.set_result(tools)
                await self._closing.wait()
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(RuntimeError(reason(error)))
            raise


async def connected(server: dict[str, Any], stack: AsyncExitStack) -> Client:
    """A client that is not connected yet."""
    if "command" in server:
        given = {name: server[name] for name in ("command", "args", "env", "cwd") if name in server}
        # The runner ends what its host has started, and finds it by this variable.
        given["env"] = {**given.get("env", {}), "WEIR_HOST": os.environ.get("WEIR_HOST", "")}
        return Client(StdioServerParameters(**given))
    if server.get("transport") == "sse":
        return Client(sse_client(server["url"], headers=server.get("headers")))
    http = await stack.enter_async_context(create_mcp_http_client(headers=server.get("headers")))
    return Client(streamable_http_client(server["url"], http_client=http))


async def tools_of(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += [
            {"name": each.name, "description": each.description or "", "parameters": each.input_schema}
            for each in page.tools
        ]
        if not (cursor := page.next_cursor):
            break
    return found


def shown(block: Any) -> str:
    return block.text if block.type == "text" else f"[content of the type {block.type} is not shown]"


def bounded(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n[cut off after {MOST_TEXT} characters]"


def reason(error: BaseException) -> str:
    """The innermost error of a group: the library's own groups say only how many there are."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:MOST_ERROR]


class ToolServer:
    """Answers requests side by side."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._servers: dict[str, dict[str, Any]] = {}
        self._episodes: dict[str, Connections] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        await self._ended.wait()
        await asyncio.gather(*(each.close() for each in self._episodes.values()))

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read requests in a thread, so that the end of the runner is seen while a server hangs."""
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._begin, json.loads(line))
        loop.call_soon_threadsafe(self._ended.set)
        threading.Event().wait(STOPS_WITHIN_S)
        os._exit(1)

    def _begin(self, request: dict[str, Any]) -> None:
        task = asyncio.create_task(self._answer(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            given = request.get("with") or {}
            async with asyncio.timeout(given.pop("limit_s", None)):
                said = await self._said(request["do"], request.get("episode") or "", given)
            reply = answered(request["id"], said)
        except TimeoutError:
            reply = failed(request["id"], "a tool server did not answer in time")
        except Exception as error:
            traceback.print_exc()
            reply = failed(request["id"], reason(error))
        write_all(self._answers, reply)

    async def _said(self, do: str, episode: str, given: dict[str, Any]) -> Any:
        if do == "start":
            self._servers = given["servers"]
            return None
        if do == "close":
            found = self._episodes.pop(episode, None)
            return await found.close() if found else None
        if do == "open":
            self._episodes[episode] = Connections(self._servers)
            return await self._episodes[episode].opened()
        return await self._episodes[episode].call(**given)


async def serve(answers: int) -> None:
    await ToolServer(answers).serve()


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not lie between the answers
    asyncio.run(serve(answers))


if __name__ == "__main__":
    main()
