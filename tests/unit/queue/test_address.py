"""Which addresses of Redis are refused before anything connects to them."""

import pytest

from rollout_queue.redis.client.address import read_address


@pytest.mark.parametrize(
    "url", ["http://h", "redis+other://h", "unix+cluster:///run/redis.sock", "", "h:6379"]
)
def test_an_address_with_an_unknown_scheme_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="give redis://, rediss://"):
        read_address(url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://h1,h2", "name the master"),
        ("redis://h1,h2", "one host"),
        ("redis+cluster://h1/1", "no databases but 0"),
        ("redis://h:port", "host:port"),
    ],
)
def test_an_address_that_contradicts_itself_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_address(url)
