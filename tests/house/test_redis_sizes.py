"""Redis serves nobody else while a command or a script runs, so none may be as long as the data are many.

A command or a loop whose size may follow data says in a comment what bounds it: `# bounded: …` in Python,
`-- bounded: …` in Lua, on its line or on the line before.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = (
    *("gateway", "trainer_service", "rollout_server", "reward_service", "fine_tuning", "environments"),
    *("queue/rollout_queue", "deploy/weir"),
)
FEW = {
    "session": "one session: what an agent has said",
    **dict.fromkeys(("TRAINER", "VERDICTS", "FORGOTTEN", "LOSSES", "LASTING"), "fields with fixed names"),
    **dict.fromkeys(("PUSHES", "CANARIES"), "the last 100"),
    **dict.fromkeys(("SERVERS", "HELD", "LOADING", "SERVER_PUSHES"), "servers, at most some thousands"),
    **dict.fromkeys(("POLICIES", "ADAPTERS"), "versions whose files are there (trainer.keep_policies)"),
    **dict.fromkeys(("REMOVED", "RESERVED"), "the last numbers, 2000 and 100"),
    **dict.fromkeys(("KEYS", "KEYS_USED", "KEYS_TOKENS"), "API keys, which operators make"),
}
"""Keys that are read whole, and what bounds them."""
WHOLE = {"hgetall", "hkeys", "hvals", "smembers", "sinter", "sunion", "sdiff"}
"""They answer with all that is under a key."""
RANGES = {"lrange": (2, 3), "zrange": (2, 3), "zrevrange": (2, 3)}
"""From a place to a place: where the last place stands among the arguments."""
COUNTED = {
    "zrangebyscore": 4,
    "zrevrangebyscore": 4,
    "xrange": 4,
    "xrevrange": 4,
    "xread": 2,
    "xreadgroup": 4,
}
"""They answer with all that lies between two ends, unless a count is given: its place among the arguments."""
MANY = {
    "mget",
    "mset",
    "hmget",
    "zmscore",
    "smismember",
    "delete",
    "unlink",
    "exists",
    "sadd",
    "srem",
    "zadd",
}
MANY |= {"zrem", "hdel", "xack", "xdel", "xclaim", "rpush", "lpush", "watch", "eval", "evalsha"}
MANY |= {"execute_command", "command", "send_command"}
"""They take as many arguments as they are given."""
LISTS = {"mget", "hmget", "zmscore", "smismember", "mset", "zadd"}
"""They take them in a list or a dictionary, too."""
ASKED_BY_NAME = {"execute_command", "command", "send_command"}
LUA_WHOLE = {*map(str.upper, WHOLE), "KEYS", "SORT", "LRANGE", "ZRANGE", "ZREVRANGE"}
LUA_COUNTED = {"ZRANGEBYSCORE": "LIMIT", "ZREVRANGEBYSCORE": "LIMIT", "XRANGE": "COUNT", "XREVRANGE": "COUNT"}
LUA_COUNTED |= {"XTRIM": "LIMIT", "XREADGROUP": "COUNT"}
LOOP = re.compile(r"#KEYS|#ARGV(?!\[)|pairs\((KEYS|ARGV)|unpack\((KEYS|ARGV)|\bwhile\b|\brepeat\b")
PLACES = re.compile(r",\s*\d+,\s*\d+\s*[,)]")
LUA_CALL = re.compile(r"redis\.p?call\(\s*(?:'(\w+)'|\"(\w+)\"|(\w+))(.*)")


def unbounded(source: str) -> Iterator[str]:
    """The line and the reason of each place that does not say what bounds it."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (why := _of_call(node)):
            if not _said(lines, node.lineno, node.end_lineno or node.lineno, "# bounded: "):
                yield f"{node.lineno}: {why}"
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            text = ast.get_source_segment(source, node) or ""
            if "redis.call(" in text or "redis.pcall(" in text:
                for at, line in enumerate(text.splitlines(), node.lineno):
                    if (why := _of_lua(line)) and not _said(lines, at, at, "-- bounded: "):
                        yield f"{at}: {why}"


def _said(lines: list[str], first: int, last: int, mark: str) -> bool:
    return any(mark in line for line in lines[max(0, first - 2) : last])


def _of_call(node: ast.Call) -> str | None:
    """What the size of this call may follow; None if nothing."""
    if not isinstance(node.func, ast.Attribute):
        return None
    name, given = node.func.attr, {each.arg for each in node.keywords}
    if name in ASKED_BY_NAME and node.args and isinstance(node.args[0], ast.Constant):
        asked = str(node.args[0].value).lower()
        if asked in WHOLE | {"keys"} | RANGES.keys():
            return asked
    if node.args and _few(node.args[0]):
        return None
    if name in WHOLE:
        return name
    if name in RANGES and not given & {"num"}:
        ends = node.args[2:3]
        return name if given & {"byscore", "bylex"} or not ends or _is_negative(ends[0]) else None
    if name in COUNTED and not given & {"num", "count"} and len(node.args) < COUNTED[name]:
        return name
    if name in MANY and any(isinstance(each, ast.Starred) for each in node.args):
        return f"{name} with *"
    if name in LISTS and any(_is_many(each) for each in (*node.args, *(k.value for k in node.keywords))):
        return f"{name} of a list"
    return "keys" if name == "keys" and node.args and _is_redis(node.func.value) else None


def _few(node: ast.expr) -> bool:
    """Whether this is the name of a key with a bound of its own."""
    called = node.func if isinstance(node, ast.Call) else node
    named = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)
    return named and called.value.id == "key_names" and called.attr in FEW  # type: ignore[attr-defined]


def _is_negative(node: ast.expr) -> bool:
    """Counted from the end: -1, or -kept - 1."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _is_many(node: ast.expr) -> bool:
    """A list whose length is not written here."""
    if isinstance(node, ast.List | ast.Tuple):
        return any(isinstance(each, ast.Starred) for each in node.elts)
    if isinstance(node, ast.Dict):
        return None in node.keys
    if isinstance(node, ast.Name):
        return node.id.islower() and node.id.endswith("s")
    return isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp | ast.Starred) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("list", "map")
    )


def _is_redis(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_") in {"redis", "client", "pipeline", "pipe", "connection"}


def _of_lua(line: str) -> str | None:
    code = line.partition("--")[0]
    if found := LOOP.search(code):
        return found[0]
    for call in LUA_CALL.finditer(code):
        command, variable, rest = call[1] or call[2], call[3], call[4]
        if variable and variable.islower():
            return f"a command in the variable {variable}"
        if command in LUA_WHOLE and not PLACES.search(rest):
            return command
        if command in LUA_COUNTED and LUA_COUNTED[command] not in rest and not _one(rest):
            return command
        if "unpack(" in rest:
            return f"{command} with unpack"
    return None


def _one(rest: str) -> bool:
    """XRANGE from an entry to the same."""
    given = [each.strip() for each in rest.strip(", ").split(")")[0].split(",")]
    return len(given) == 3 and given[1] == given[2]


def test_what_may_grow_with_data_says_what_bounds_it() -> None:
    paths = [path for room in PRODUCT for path in sorted((ROOT / room).rglob("*.py"))]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    read = {path: source for path, source in sources.items() if "redis" in source}
    assert not [f"{path}:{found}" for path, source in read.items() for found in unbounded(source)]


def test_every_script_is_declared_as_one() -> None:
    """The others are sent by their text, on the connection that has to run them."""
    others = {"lua.py", "pipelined.py", "losses.py", "turn_store.py"}
    runs = re.compile(r"register_script|script_load|evalsha|EVALSHA|\"EVAL\"|redis\.eval\(")
    paths = [path for room in PRODUCT for path in (ROOT / room).rglob("*.py")]
    found = {path.name for path in paths if runs.search(path.read_text(encoding="utf-8"))}
    assert found == others


@pytest.mark.parametrize(
    "code",
    [
        "await redis.hgetall(key)",
        "self._store.smembers(key_names.group_members(name))",
        "pipeline.lrange(key, 0, -1)",
        "redis.zrange(key, 0, -1, withscores=True)",
        "redis.zrange(key, low, high, byscore=True)",
        "redis.zrangebyscore(key, low, high)",
        "redis.xrange(key)",
        'redis.xrange(key, "-", "+")',
        "redis.xread({key: last})",
        "redis.delete(*names)",
        "pipeline.xack(key, group, *entry_ids)",
        "redis.xdel(key, *entry_ids)",
        "redis.mget([name(each) for each in sessions])",
        "redis.mget(names)",
        "redis.hmget(key, list(fields))",
        "redis.zadd(key, {name: 1 for name in names})",
        'connection.command("HGETALL", key)',
        'redis.execute_command("MGET", *names)',
        "redis.evalsha(sha, len(keys), *keys)",
        'redis.keys("weir:*")',
        "S = \"redis.call('HGETALL', KEYS[1])\"",
        "S = \"for at = 1, #KEYS do redis.call('DEL', KEYS[at]) end\"",
        "S = \"redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 2))\"",
        "S = \"redis.call('DEL', unpack(gone))\"",
        "S = \"redis.call('ZRANGE', KEYS[1], 0, -1)\"",
        "S = \"redis.call('ZRANGEBYSCORE', KEYS[1], 0, ARGV[1])\"",
        "S = \"redis.call('XRANGE', KEYS[1], '-', '+')\"",
        "S = \"redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])\"",
        "S = \"for _, key in ipairs(KEYS) do redis.call('GET', key) end\"",
        "S = \"while true do redis.call('LPOP', KEYS[1]) end\"",
    ],
)
def test_a_size_that_follows_data_is_found(code: str) -> None:
    assert len(list(unbounded(code))) == 1
    mark = "-- bounded: by a page" if code.startswith("S = ") else "# bounded: by a page"
    line = code[:-1] + f' {mark}"' if code.startswith("S = ") else f"{code}  {mark}"
    assert not list(unbounded(line))


@pytest.mark.parametrize(
    "code",
    [
        "redis.hget(key, name)",
        'redis.hmget(key, "a", "b")',
        "redis.hgetall(key_names.TRAINER)",
        "redis.xrange(key, start, end, 50)",
        "redis.xread({key: last}, count=1)",
        "redis.zrange(key, start, start + PAGE - 1)",
        "redis.zrangebyscore(key, low, high, start=0, num=100)",
        "redis.delete(key)",
        "settings.keys()",
        "files.delete(path)",
        "S = \"redis.call('ZRANGE', KEYS[1], 0, 0)\"",
        "S = \"redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])\"",
        "S = \"redis.call('ZRANGEBYSCORE', KEYS[1], 0, 9, 'LIMIT', 0, 100)\"",
        "S = \"local size = #ARGV[4] redis.call('GET', KEYS[1])\"",
    ],
)
def test_what_has_a_bound_of_its_own_needs_no_word(code: str) -> None:
    assert not list(unbounded(code))
