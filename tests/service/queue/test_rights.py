"""The rights that docs/redis.md gives to services are those that the code uses: none is missing or spare."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from redis import Redis

ROOT = Path(__file__).parents[3]
PACKAGES = ("queue/rollout_queue", "gateway", "trainer_service", "deploy/weir")
NOT_REDIS = frozenset(
    {
        *("append", "command", "copy", "digest", "echo", "keys", "move", "publish"),
        *("rename", "restore", "save", "shutdown", "sort", "touch", "type"),
    }
)
"""Methods of other objects that are called like a command. No service uses these commands."""
METHODS = {
    "delete": "del",
    "hscan_iter": "hscan",
    "xgroup_create": "xgroup",
    "xinfo_groups": "xinfo",
    "xinfo_stream": "xinfo",
    "xpending_range": "xpending",
}
"""Methods of redis-py with another name than their command."""
BY_THE_CLIENT = frozenset(
    {
        *("auth", "discard", "eval", "evalsha", "exec", "hello"),
        *("multi", "role", "script", "select", "unwatch", "watch"),
    }
)
"""What the client itself sends."""


OF_OPERATORS = {"replconf", "restore", "sync"}
"""What `weir backup` and `weir restore` send, with a user of their own."""


def granted() -> set[str]:
    line = re.search(r"^user weir .*$", (ROOT / "docs" / "redis.md").read_text(), re.MULTILINE)
    assert line
    return {right[1:].partition("|")[0] for right in line[0].split() if right.startswith("+")}


def used() -> Iterator[str]:
    """The commands in Lua, in calls that name a command, and methods that are called like one."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield from (name.lower() for name in re.findall(r"redis\.p?call\(\s*'([A-Z]+)'", text))
        if not re.search(r"[Rr]edis|pipeline", text):
            continue
        named = re.findall(r"(?:command|WAIT|READ)\(\s*\"([A-Z]+)[ \"]|\(\"(WATCH|XREADGROUP|GET)\"", text)
        yield from (name.lower() for pair in named for name in pair if name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                if hasattr(Redis, name) and name not in NOT_REDIS and (name in METHODS or is_command(name)):
                    yield METHODS.get(name, name)


def is_command(name: str) -> bool:
    """Whether a method of redis-py's client is a command's, and not one of the client."""
    defined = getattr(Redis, name)
    return name.isalnum() and "commands" in getattr(defined, "__module__", "")


def test_the_documented_rights_are_those_that_the_code_uses() -> None:
    needed = set(used()) - OF_OPERATORS | BY_THE_CLIENT | {"wait"}
    assert needed - granted() == set(), "a right is missing"
    assert granted() - needed == set(), "a right is spare"
