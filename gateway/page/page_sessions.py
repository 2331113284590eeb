"""Who is signed in on the page. A browser holds a random token in a cookie; Redis has the token's digest.

weir:page_session:{digest of the token}      the sign-in, JSON; expires when it was idle, or is too old
weir:page_sessions:{digest of the secret}    the tokens' digests of one secret, by when they end at the latest

A sign-in names an API key by the digest of its secret. So it ends at once when the key is revoked.
"""

import secrets

import msgspec
from redis.asyncio import Redis

from gateway.settings import PageSettings
from rollout_queue import clock
from rollout_queue.http.keys import digest
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored


class PageSession(msgspec.Struct, frozen=True):
    """A sign-in."""

    key_digest: str
    """The digest of the secret with which the user signed in."""
    csrf: str
    """What requests that may change something have in `x-weir-csrf`."""
    ends_at: float
    """Seconds since the epoch; from then on the user has to sign in again."""


class PageSessions:
    """The sign-ins of all gateways. Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis, settings: PageSettings) -> None:
        self._redis = redis
        self._settings = settings

    async def begin(self, key_digest: str) -> tuple[str, PageSession]:
        """Sign in. Returns the token for the cookie, which is stored nowhere, and the sign-in.

        Beyond `sessions_per_key`, those that end first are signed out.
        """
        token, now = secrets.token_urlsafe(32), clock.now()
        session = PageSession(key_digest, secrets.token_urlsafe(32), now + self._settings.longest_s)
        of_key = keys.page_sessions_of(key_digest)
        async with self._redis.pipeline(transaction=True) as beginning:
            name = keys.page_session(digest(token))
            beginning.set(name, msgspec.json.encode(session), ex=self._idle_s(session, now))
            beginning.zadd(of_key, {digest(token): session.ends_at})
            beginning.zremrangebyscore(of_key, 0, now)
            # bounded: what one more sign-in is too many
            beginning.zrange(of_key, 0, -self._settings.sessions_per_key - 1)
            beginning.zremrangebyrank(of_key, 0, -self._settings.sessions_per_key - 1)
            beginning.expire(of_key, int(self._settings.longest_s) + 1)
            *_, oldest, _, _ = await stored(beginning.execute())
        if oldest:
            # bounded: so, too
            await stored(self._redis.delete(*(keys.page_session(each.decode()) for each in oldest)))
        return token, session

    async def find(self, token: str, *, used: bool = True) -> PageSession | None:
        """The sign-in of this token; None if it has ended. If `used`, its idle time begins anew."""
        name, now = keys.page_session(digest(token)), clock.now()
        packed = await stored(self._redis.get(name))
        if packed is None:
            return None
        session = msgspec.json.decode(packed, type=PageSession)
        if session.ends_at <= now:
            return None
        if used:
            await stored(self._redis.expire(name, self._idle_s(session, now)))
        return session

    async def end(self, token: str, session: PageSession) -> None:
        """Sign out."""
        await stored(self._redis.delete(keys.page_session(digest(token))))
        await stored(self._redis.zrem(keys.page_sessions_of(session.key_digest), digest(token)))

    def _idle_s(self, session: PageSession, now: float) -> int:
        return max(1, int(min(self._settings.idle_s, session.ends_at - now)))
