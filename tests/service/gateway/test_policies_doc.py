"""The examples of docs/policies.md and docs/transports.md run as they stand, on three rollout servers."""

import re
import shlex
from pathlib import Path

import httpx

from tests.support.gateway.deployment import Deploy
from tests.support.gateway.running import ADMIN_KEY
from tests.support.waiting import wait_until

PAGES = [Path(__file__).parents[3] / "docs" / name for name in ("policies.md", "transports.md")]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
VERSIONS = 4
"""The page's examples begin with versions 0 to 4. All are adapters, or the page's adapter would not fit."""


def examples() -> list[list[str]]:
    """The words of every curl command of the pages."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    text = "".join(BLOCK.findall(pages)).replace("\\\n", " ")
    lines = (line for line in text.splitlines() if line.startswith("curl "))
    return [shlex.split(line, comments=True)[1:] for line in lines]


def request(words: list[str]) -> tuple[str, str, str | None]:
    """The method, the URL and the body of a curl command with the options that the page uses."""
    method, url, body, left = "", "", None, list(words)
    while left:
        match left.pop(0):
            case "-s":
                pass
            case "-H":
                left.pop(0)
            case "-X":
                method = left.pop(0)
            case "-d":
                body = left.pop(0)
            case word:
                assert not word.startswith("-"), word
                url = word
    return method or ("POST" if body else "GET"), url, body


def test_every_example_is_answered(deploy: Deploy) -> None:
    deployment = deploy(3, lora={"max_rank": 4, "target_modules": ["embed_tokens"]})
    for version in range(1, VERSIONS + 1):
        deployment.announce(version, deployment.write_adapter(version).as_uri())
        deployment.until("serving")
    places = {
        "file:///srv/policies/v00000005": deployment.write_adapter(VERSIONS + 1).as_uri(),
        "file:///srv/policies/math-1": deployment.write_adapter(1, "math").as_uri(),
    }
    answers = []
    for words in examples():
        method, url, body = request(words)
        for written, real in places.items():
            body = body and body.replace(written, real)
        reply = httpx.request(
            method,
            url.replace("$WEIR", deployment.gateway.url),
            content=body,
            headers={"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"},
            timeout=300,
        )
        assert reply.status_code == 200, (words, reply.text)
        answers.append((method, url.removeprefix("$WEIR/admin/policies")))
        wait_until(lambda: deployment.plan()["push"]["state"] != "pushing")
    assert len(answers) == len(set(answers)) + 1, "hold comes twice"
    assert {path for _, path in answers} >= {"/serving", "/rollback", "/5/canary", "/3/pin"}
