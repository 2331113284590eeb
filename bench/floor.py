"""The lower bound of the gateway's cost: its HTTP server with a constant answer.

python -m bench.floor PORT
"""

import sys

from starlette.types import Receive, Scope, Send

from rollout_queue.http.http_server import serve

BODY = b'{"id":"chatcmpl-0","object":"chat.completion","choices":[]}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]


async def constant(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the request, and send the constant answer."""
    while (await receive()).get("more_body"):
        pass
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": BODY})


if __name__ == "__main__":
    serve(constant, "127.0.0.1", int(sys.argv[1]), drain_s=1)
