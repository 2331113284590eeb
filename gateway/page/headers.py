"""The headers that tell browsers what the page may do: use its own files, and the REST of its gateway."""

from typing import Final

from rollout_queue.http.api_page import COMMON

ASSET: Final = {
    **COMMON,
    "content-security-policy": "default-src 'none'",
    "vary": "accept-encoding",
}
FOR_EVER: Final = "public, max-age=31536000, immutable"
"""A file under the path of this version never changes."""
EACH_TIME: Final = "no-cache"
"""A file under the path of another version, while gateways of two builds run, is asked for each time."""
ANSWER: Final = {**COMMON, "cache-control": "no-store"}
