"""An MCP server with a few tools: `vault.py TRANSPORT [PORT]`."""

import asyncio
import os
import signal
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("vault", log_level="ERROR")
calls = 0


@server.tool()
def look(key: int) -> str:
    """What is kept under a key."""
    global calls
    calls += 1
    return f"{key} keeps {key * 7 + 3} (call {calls}, for {os.environ.get('VAULT_OWNER', 'nobody')})"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    # as long as the model asks for
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """End the server."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "dead"


@server.tool()
def refuse() -> str:
    """Fail."""
    raise ValueError("the vault is shut")


@server.tool()
def long() -> str:
    """A long text."""
    return "x" * 300_000


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=b"none", format="png")


if __name__ == "__main__":
    where = {"host": "127.0.0.1", "port": int(sys.argv[2])} if len(sys.argv) > 2 else {}
    server.run(sys.argv[1], **where)
