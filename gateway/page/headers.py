"""The headers that tell browsers what the page may do: use its own files, and the REST of its gateway."""

from typing import Final

CONTENT_SECURITY_POLICY: Final = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        # The browser refuses markup and code that are made from strings.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
COMMON: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
HTML: Final = {
    **COMMON,
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
}
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
