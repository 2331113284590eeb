"""The guide to two machines (docs/operations.md), followed on two hosts, with an engine double for SGLang."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.redis_process import redis_executable
from tests.support.rollout_server.stub_engine import stub_interpreter
from tests.support.trainer_service.host_pair import launched
from tests.support.trainer_service.hosts import Host, two_hosts, why_not
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", GUIDE.split("## Two machines")[1].split("\n## ")[0], re.S)
GATEWAY = "http://10.77.0.1:8000"
STARTS_WITHIN_S = 400.0
REASON = why_not()

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(REASON is not None, reason=f"two hosts on one machine: {REASON}"),
]


def adapted(block: str, folder: Path, model: Path) -> str:
    """The commands of the guide with the addresses and paths of the test, in the foreground."""
    places = {
        "10.0.0.": "10.77.0.",
        ".venv-engine/bin/python": str(stub_interpreter(folder)),
        ".venv/bin/python -c 'from weir.stack.service_process import executable; print(executable())'": (
            f"echo {redis_executable()}"
        ),
        ".venv/bin/python": sys.executable,
        "/models/policy": str(model),
        "queue/": f"{ROOT}/queue/",
    }
    for theirs, ours in places.items():
        block = block.replace(theirs, ours)
    return f"cd {folder}\n{block}\nwait\n"


def answer(host: Host, url: str, *words: str) -> tuple[int, str]:
    """Status and body, as this host sees them; status 0 if nobody answers."""
    command = ["curl", "-s", "-m", "20", "-w", "\n%{http_code}", *words, url]
    done = subprocess.run(host.enter(*command), capture_output=True, text=True, check=False)
    body, _, status = done.stdout.rpartition("\n")
    return int(status or 0), body


def test_one_machine_trains_and_the_other_samples(tmp_path: Path, tiny_model: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    trainers, engines = BLOCKS
    scripts = [adapted(trainers, first, tiny_model), adapted(engines, second, tiny_model)]
    own = {"ENGINE_DOUBLE_DIR": str(tiny_model), "DS_ACCELERATOR": "cpu"}
    own |= {name: "" for name in os.environ if name.startswith("WEIR_")}
    log = tmp_path / "log"
    with two_hosts(tmp_path) as (a, b), launched([a.enter("bash", "-c", scripts[0])], [own], log):
        wait_until((first / "run" / "engine_key").exists)
        keys = {role: (first / "run" / f"{role}_keys").read_text().strip() for role in ("client", "admin")}
        keys["rollout_server"] = (first / "run" / "rollout_server_key").read_text().strip()
        (second / "run").mkdir()
        for name in ("rollout_server_key", "engine_key"):
            wait_until((first / "run" / name).read_text)
            shutil.copy(first / "run" / name, second / "run" / name)
        with launched([b.enter("bash", "-c", scripts[1])], [own], log):
            wait_until(lambda: answer(a, f"{GATEWAY}/ready")[0] == 200, STARTS_WITHIN_S)
            check_calls(a, b, keys)


def check_calls(a: Host, b: Host, keys: dict[str, str]) -> None:
    body = json.dumps(
        {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    )
    words = ["-H", "content-type: application/json", "-d", body]
    url = f"{GATEWAY}/v1/chat/completions"
    status, text = answer(b, url, "-H", f"authorization: Bearer {keys['client']}", *words)
    assert status == 200, text
    assert answer(b, url, *words)[0] == 401
    wait_until(lambda: answer(b, "http://10.77.0.1:8200/ready")[0] == 200, STARTS_WITHIN_S)
    admin = ("-H", f"authorization: Bearer {keys['admin']}")
    assert answer(b, "http://10.77.0.1:8200/weights", *admin)[0] == 200
    of_servers = ("-H", f"authorization: Bearer {keys['rollout_server']}")
    status, text = answer(a, "http://10.77.0.2:8100/status", *of_servers)
    assert (status, json.loads(text)["engine_url"]) == (200, "http://10.77.0.2:30000")
    # Redis is the first machine's own.
    refused = subprocess.run(
        b.enter("bash", "-c", ": </dev/tcp/10.77.0.1/6379"), capture_output=True, check=False
    )
    assert refused.returncode != 0
