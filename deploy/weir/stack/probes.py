"""Asks each service whether it is ready, and the gateway for the state of the whole system."""

import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Any

import msgspec
from redis.exceptions import RedisError

from rollout_queue.foreign_json import read_json
from rollout_queue.http.keys import bearer
from rollout_queue.protocol.errors import ErrorReply
from rollout_queue.protocol.message import MalformedMessage
from rollout_queue.protocol.status import SystemStatus
from rollout_queue.redis.availability import refusal
from rollout_queue.redis.client.opening import open_redis
from rollout_queue.redis.client.settings import RedisSettings
from weir.stack.process import Readiness

PROBE_TIMEOUT_S = 5.0


class RewardStatus(msgspec.Struct, frozen=True):
    """What the reward service tells of itself, as far as it is shown."""

    in_work: int
    """Sessions that are graded, or wait for it."""
    dead_letters: list[Any]
    python_isolated: bool | None = None
    """Whether Python graders are isolated; None if it is not known."""


def http_ready(url: str) -> Readiness:
    """A probe by GET /ready: 200 means ready; any other answer says why not."""

    def ready() -> str | None:
        with suppress(OSError, HTTPException):  # on a busy machine, a body may come later than its head
            try:
                with urllib.request.urlopen(f"{url}/ready", timeout=PROBE_TIMEOUT_S):  # noqa: S310 - http only
                    return None
            except urllib.error.HTTPError as refusal:
                return refusal_of(refusal.read(), refusal.code)
        return "it does not answer yet"

    return ready


def redis_ready(settings: RedisSettings) -> Readiness:
    """A probe by PING, which Redis refuses while it loads its file."""

    def ready() -> str | None:
        try:
            with open_redis(settings, PROBE_TIMEOUT_S) as client:
                client.ping()
            return None
        except RedisError as error:
            return refusal(error) or str(error) or "it does not answer yet"

    return ready


def ready_of(url: str) -> Readiness:
    """The probe of a service of `weir up`, by the kind of its address."""
    return redis_ready(RedisSettings(redis_url=url)) if url.startswith("redis:") else http_ready(url)


def system_status(gateway_url: str, admin_key: str | None) -> SystemStatus:
    """The gateway's report of the system. Raises OSError if the gateway gives none, MalformedMessage if this
    build cannot read it."""
    headers = bearer(admin_key)
    request = urllib.request.Request(f"{gateway_url}/admin/status", headers=headers)  # noqa: S310 - http only
    with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:  # noqa: S310
        return SystemStatus.read(answer.read())


def reward_status(url: str, admin_key: str | None) -> RewardStatus:
    """The reward service's report. Raises OSError if it gives none, msgspec.DecodeError for another one."""
    headers = bearer(admin_key)
    request = urllib.request.Request(f"{url}/status", headers=headers)  # noqa: S310 - http only
    with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:  # noqa: S310
        return read_json(answer.read(), RewardStatus)


def refusal_of(body: bytes, status: int) -> str:
    """The sentence of an error body; without one, the status."""
    try:
        return ErrorReply.read(body).error.message
    except MalformedMessage:
        return f"HTTP {status}"
