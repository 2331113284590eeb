"""How a service is asked whether it can do its work."""

import json
import urllib.error
import urllib.request
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from weir.stack.process import Readiness

PROBE_TIMEOUT_S = 5.0


def http_ready(url: str) -> Readiness:
    """GET /ready: 200 is ready, another status says why not."""

    def ready() -> str | None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=PROBE_TIMEOUT_S):  # noqa: S310 - http only
                return None
        except urllib.error.HTTPError as refusal:
            return _message(refusal.read(), refusal.code)
        except OSError:
            return "it does not answer yet"

    return ready


def redis_ready(url: str) -> Readiness:
    """PING; a Redis that still reads its file refuses it."""

    def ready() -> str | None:
        try:
            with Redis.from_url(url, socket_timeout=PROBE_TIMEOUT_S) as client:
                client.ping()
            return None
        except RedisError as error:
            return str(error) or "it does not answer yet"

    return ready


def get_json(url: str, key: str | None = None) -> dict[str, Any]:
    """The body of a GET; raises OSError when there is none."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http only
    with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:  # noqa: S310
        body = json.load(answer)
    if not isinstance(body, dict):
        raise OSError(f"{url} did not answer with an object")
    return body


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
