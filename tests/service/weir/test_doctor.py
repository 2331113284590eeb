"""`weir doctor` on a real Redis, gateway and trainer interface: each fault of services and fleet is told."""

import asyncio
import http.server
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner

from environments.errors import RunStopped
from environments.start_run import RunPlace
from gateway.settings import GatewaySettings
from reward_service.app import create_app as create_rewards
from reward_service.settings import RewardSettings
from rollout_queue.protocol.gateway_messages import NO_SIGN_OF_LIFE, SystemStatus
from rollout_queue.protocol.message import ModelCheck
from rollout_queue.redis import key_names
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY
from tests.support.serving import NOBODY, free_port, serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until
from tests.support.weir.examined import ExaminedSystem, examined_system
from weir.__main__ import app
from weir.doctor.asking import DATE_AGES_S
from weir.doctor.deployment_facts import DeploymentFacts, RedisFacts, ServiceFacts
from weir.doctor.doctor import examined
from weir.stack.run_keys import with_keys
from weir.stack.settings import StackSettings
from weir.stack.stack_state import ProcessState, StackState
from weir.status import rows_of


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ExaminedSystem]:
    with examined_system(tmp_path_factory.mktemp("examined"), tiny_model) as system:
        yield system


@pytest.fixture
def system(running: ExaminedSystem) -> Iterator[ExaminedSystem]:
    """The same, with a trainer that has just reported."""
    running.report(last_seen=time.time(), waiting_for="entries")
    running.settings = {}
    yield running
    running.redis.client.delete(key_names.VERDICTS, key_names.SETTLED, key_names.DEAD_LETTERS)
    running.server.status_nonsense = None


def test_a_deployment_without_faults_has_no_problem(system: ExaminedSystem) -> None:
    assert system.problems() == {}


def test_the_command_prints_sentences_or_json_and_exits_with_1_if_something_is_wrong(
    system: ExaminedSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_ADMIN_KEYS", ADMIN_KEY)
    command = ["doctor", "--run-dir", str(tmp_path), "--redis-url", system.redis.url]
    system.redis.client.config_set("appendfsync", "everysec")
    try:
        said = CliRunner().invoke(app, [*command, "--gateway-url", system.gateway_url])
        told = CliRunner().invoke(app, [*command, "--gateway-url", system.gateway_url, "--json"])
    finally:
        system.redis.client.config_set("appendfsync", "always")
    assert said.exit_code == 1
    assert "warning: Redis syncs its file everysec" in said.output
    assert "[redis_syncs_late]\n    set appendfsync always" in said.output
    found = json.loads(told.stdout)
    assert (found["ok"], found["gateway"]) == (False, system.gateway_url)
    assert "redis_syncs_late" in {problem["check"] for problem in found["problems"]}


@pytest.fixture
def run_dir(system: ExaminedSystem, tmp_path: Path) -> Path:
    """The run directory of these services, as if `weir up` had started them."""
    run_dir = tmp_path / "run"
    with_keys(StackSettings(run_dir=run_dir, client_keys=[CLIENT_KEY], admin_keys=[ADMIN_KEY]))
    urls = {"redis": system.redis.url, "gateway": system.gateway_url, "trainer_service": system.trainer_url}
    services = {name: ProcessState.of(os.getpid(), url) for name, url in urls.items()}
    StackState(parent=ProcessState.of(os.getpid()), phase="up", services=services).write(run_dir)
    return run_dir


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["status"], "serves version 0"),
        (["top", "--once"], "v0"),
        (["doctor", "--json"], '"problems"'),
        (["audit", "--json"], '"ledger": "http://'),
    ],
)
def test_commands_find_the_keys_by_the_run_directory(run_dir: Path, command: list[str], says: str) -> None:
    said = CliRunner().invoke(app, [*command, "--run-dir", str(run_dir)]).output
    assert says in said
    assert f"looking at the stack in {run_dir}, gateway http://" in said
    assert not re.search(r"no answer from|keys_differ|API key|\b401\b", said), said


def test_the_keys_of_a_run_go_to_no_other_gateway(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, system: ExaminedSystem
) -> None:
    told: list[dict[str, str]] = []

    def asked(request: Request) -> JSONResponse:
        told.append(dict(request.headers))
        return JSONResponse({})

    async def played(_: object, place: RunPlace, *__: object) -> None:
        places.append(place)
        raise RunStopped("enough")

    places: list[RunPlace] = []
    monkeypatch.setattr("environments.start_run.play_run", played)
    monkeypatch.setenv("WEIR_STACK__RUN_DIR", str(run_dir))
    with serving(Starlette(routes=[Route("/{path:path}", asked)])) as elsewhere:
        CliRunner().invoke(app, ["top", "--once", "--gateway-url", elsewhere])
    assert told
    assert not any("authorization" in headers for headers in told)
    out = ["--run-dir", str(run_dir / "episodes")]
    for gateway in ([], ["--gateway", system.gateway_url], ["--gateway", "http://127.0.0.2:1"]):
        CliRunner().invoke(app, ["env", "eval", "python:module:Class", *out, *gateway])
    assert [(each.gateway_url, each.client_key) for each in places] == [
        *[(system.gateway_url, CLIENT_KEY)] * 2,
        ("http://127.0.0.2:1", None),
    ]


def test_what_services_found_out_about_the_model_is_one_table_and_two_models_are_an_error(
    system: ExaminedSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_ADMIN_KEYS", ADMIN_KEY)
    row = ModelCheck(check="tensors", outcome="right", detail="24 tensors, F32, digest aa")
    head = ModelCheck(check="output head", outcome="differs", detail="lm_head.weight equals the embedding")
    system.trainer.model_checks = (row, head)
    system.server.more = {"model_checks": [row.model_dump()]}
    try:
        assert system.problems() == {}
        command = ["doctor", "--run-dir", str(tmp_path), "--redis-url", system.redis.url]
        command += ["--gateway-url", system.gateway_url]
        said = CliRunner().invoke(app, command, env={"COLUMNS": "200"}).output
        assert "the model, checked at the start" in said
        assert re.search(r"trainer .* output head .* differs .* lm_head.weight equals the embedding", said)
        told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["model"]
        assert [(each["service"], each["check"]) for each in told] == [
            ("gateway", "chat template"),
            ("gateway", "end tokens"),
            ("gateway", "tokenizer"),
            ("r0", "tensors"),
            ("trainer", "tensors"),
            ("trainer", "output head"),
        ]
        system.server.more = {"model_checks": [row.model_dump() | {"detail": "25 tensors, F32, digest bb"}]}
        assert "the trainer and r0 began with different models" in system.problems()["models_differ"]
        other = ModelCheck(check="tokenizer", outcome="right", detail="2 texts are 3 ids, digest aa")
        system.trainer.model_checks = (row, other)
        assert "other ids than transformers" in system.problems()["tokenizers_differ"]
    finally:
        system.trainer.model_checks, system.server.more = (), {}


def test_a_service_that_is_away_is_named(system: ExaminedSystem) -> None:
    found = system.problems(gateway_url=NOBODY)
    assert f"gateway at {NOBODY} does not answer" in found["service_silent"]
    system.report(last_seen=time.time(), url=NOBODY)
    assert f"trainer at {NOBODY} does not answer" in system.problems()["service_silent"]


@pytest.mark.parametrize(("options", "patience"), [([], "3 s"), (["--timeout", "0.2"], "0.2 s")])
def test_services_that_hang_cost_a_bounded_time(
    turned: TurnedClock, system: ExaminedSystem, options: list[str], patience: str
) -> None:
    async def hang(_: Request) -> JSONResponse:
        await asyncio.sleep(0.2)  # the doctor asks Redis meanwhile
        turned.turn(float(patience.split()[0]))
        await asyncio.Event().wait()
        return JSONResponse({})

    deaf = Starlette(routes=[Route("/{path:path}", hang)])
    with serving(deaf) as url:
        system.report(last_seen=time.time(), url=url)
        command = ["doctor", "--redis-url", system.redis.url, "--gateway-url", url, *options]
        said = CliRunner().invoke(app, command)
    assert said.exit_code == 1
    assert f"gateway at {url} does not answer: no answer within {patience}" in said.output


def test_a_service_that_is_not_ready_is_named(system: ExaminedSystem) -> None:
    async def starting(_: Request) -> JSONResponse:
        return JSONResponse({"error": {"message": "it reads the stream"}}, 503)

    async def status(_: Request) -> JSONResponse:
        return JSONResponse({})

    with serving(Starlette(routes=[Route("/ready", starting), Route("/status", status)])) as url:
        system.report(last_seen=time.time(), url=url)
        assert system.problems()["service_unready"] == "trainer is not ready: it reads the stream"


def test_keys_that_differ_are_found(system: ExaminedSystem) -> None:
    found = system.problems(admin_key="another")
    assert found["keys_differ"].startswith("gateway, trainer refuse the admin key")


def test_a_report_of_another_release_is_found(system: ExaminedSystem) -> None:
    system.server.status_nonsense = {"state": "ready", "version": "zero"}
    said = "cannot read the report of r0: not a ServerStatus: version"
    assert said in system.problems()["report_unreadable"]
    system.server.status_nonsense = {"state": "ready", "version": 0, "release": "0.0.9, schema 1"}
    assert "r0 0.0.9, schema 1" in system.problems()["releases_differ"]


@contextmanager
def a_trainer_whose_clock_is_late(
    system: ExaminedSystem, turned: TurnedClock, for_s: float
) -> Iterator[None]:
    """Its header `Date` is of 2015 for so many seconds after the first request, and right afterwards. The
    clock is turned when the doctor waits for another header."""
    first: list[float] = []
    over = threading.Event()

    class Late(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first.append(turned.monotonic())
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def date_time_string(self, timestamp: float | None = None) -> str:
            is_late = turned.monotonic() - first[0] < for_s
            return "Thu, 01 Jan 2015 00:00:00 GMT" if is_late else super().date_time_string(turned.now())

    def turn() -> None:
        while not over.wait(0.01):
            if any(each.due - turned.monotonic() <= DATE_AGES_S for each in list(turned.timers)):
                turned.turn(DATE_AGES_S)

    with http.server.HTTPServer(("127.0.0.1", free_port()), Late) as server:
        threads = threading.Thread(target=server.serve_forever), threading.Thread(target=turn)
        for thread in threads:
            thread.start()
        system.report(last_seen=time.time(), url=f"http://127.0.0.1:{server.server_port}")
        try:
            yield
        finally:
            over.set()
            server.shutdown()
            for thread in threads:
                thread.join()


def test_clocks_that_differ_are_found(turned: TurnedClock, system: ExaminedSystem) -> None:
    with a_trainer_whose_clock_is_late(system, turned, for_s=math.inf):
        assert system.problems()["clocks_apart"].endswith("s ahead of trainer")


def test_an_old_date_of_a_service_that_was_busy_is_no_wrong_clock(
    turned: TurnedClock, system: ExaminedSystem
) -> None:
    with a_trainer_whose_clock_is_late(system, turned, for_s=1.0):
        assert "clocks_apart" not in system.problems()


def test_keys_that_everybody_knows_are_found(tmp_path: Path, tiny_model: Path) -> None:
    more = {"admin_keys": [ADMIN_KEY, "dev-admin-key"]}
    with examined_system(tmp_path, tiny_model, **more) as system:
        system.report(last_seen=time.time())
        assert system.problems() == {
            "default_keys": "everybody knows the keys dev-admin-key: set WEIR_CLIENT_KEYS and WEIR_ADMIN_KEYS"
        }


def test_a_redis_that_is_away_is_the_one_cause_that_is_named(tmp_path: Path, tiny_model: Path) -> None:
    with examined_system(tmp_path, tiny_model) as system:
        system.redis.kill()
        ready = f"{system.gateway_url}/ready"
        wait_until(lambda: httpx.get(ready, timeout=120).status_code == 503)
        found = system.examined()
    checks = {each.check for each in found}
    assert checks == {"redis_silent", "service_unready"}
    assert "release" not in " ".join(each.advice for each in found)
    assert "gateway is not ready: Redis does not answer" in " ".join(each.sentence for each in found)


def test_an_engine_that_hangs_is_an_error_and_not_called_ready(system: ExaminedSystem) -> None:
    status = SystemStatus.read(system.admin("GET", "/admin/status").content)
    (server,) = status.rollout_servers

    def told(error: str) -> list[tuple[str, str]]:
        hung = server.model_copy(update={"error": error})
        facts = DeploymentFacts(
            gateway=ServiceFacts(kind="gateway", name="gateway", url=system.gateway_url),
            redis=RedisFacts(address="redis://127.0.0.1", config={}),
            system=status.model_copy(update={"rollout_servers": (hung,)}),
        )
        found = [each for each in examined(facts).problems if each.check == "server_down"]
        return [(each.severity, each.sentence) for each in found]

    assert told(NO_SIGN_OF_LIFE) == [("error", f"engine {server.id} gets no calls: {NO_SIGN_OF_LIFE}")]
    assert told("HTTP 500") == [("warning", f"engine {server.id} gets no calls: HTTP 500")]


def test_what_listens_beyond_this_machine_without_keys_is_found(system: ExaminedSystem) -> None:
    system.settings = {
        "gateway": {"host": "0.0.0.0", "admin_keys": []},
        "rollout_server": {"engine_host": "0.0.0.0"},
    }

    def told() -> list[str]:
        return [each.sentence for each in system.examined() if each.check == "listens_without_keys"]

    gateway, engine = told()
    assert gateway.startswith("gateway.host is 0.0.0.0, and gateway has no keys")
    assert engine.startswith("the engine listens on 0.0.0.0 and asks for no key")
    system.settings["rollout_server"] |= {"engine_key": "a-key"}
    assert told() == [gateway]


def test_rollout_servers_are_asked_with_a_key_of_their_own_if_they_have_one(system: ExaminedSystem) -> None:
    system.server.keys.clear()
    assert system.problems(server_key="of-servers") == {}
    assert "Bearer of-servers" in system.server.keys


def test_a_public_address_that_nobody_reaches_is_found(system: ExaminedSystem) -> None:
    system.settings = {"gateway": {"public_url": NOBODY}}
    assert NOBODY in system.problems()["public_url_unreachable"]
    system.settings = {"gateway": {"public_url": system.gateway_url}}
    assert system.problems() == {}


def test_a_fleet_without_engines_and_an_engine_that_is_drained(system: ExaminedSystem) -> None:
    assert system.admin("POST", "/admin/rollout_servers/r0/drain").status_code == 200
    found = system.problems()
    assert found["no_server"] == "none of the 1 engines is ready"
    assert found["server_down"].startswith("engine r0 is draining")
    assert system.admin("POST", "/admin/rollout_servers/r0/resume").status_code == 200
    system.until("ready")
    assert system.problems() == {}


def test_a_server_that_the_gateway_does_not_know_is_found(system: ExaminedSystem, tmp_path: Path) -> None:
    with serving(type(system.server)().app()) as url:
        here = ProcessState.of(1, url)
        stack = StackState(parent=here, services={"rollout_server": here})
        found = system.problems(stack=stack, run_dir=tmp_path)
    assert found["server_not_registered"] == f"rollout_server at {url} runs, and the gateway does not know it"


def test_graders_that_are_not_isolated_are_told_by_doctor_and_status(
    system: ExaminedSystem, tmp_path: Path
) -> None:
    for isolated, said in ((False, "; Python graders are not isolated"), (True, ""), (None, "")):
        rewards = create_rewards(RewardSettings(admin_keys=[ADMIN_KEY]), isolated=isolated)
        with serving(rewards) as url:
            here = ProcessState.of(os.getpid(), url=url)
            stack = StackState(parent=here, services={"reward_service": here})
            found = system.problems(stack=stack, run_dir=tmp_path)
            (row,) = rows_of(stack, ADMIN_KEY)
        assert ("graders_not_isolated" in found) is (isolated is False)
        assert row.detail == f"0 sessions in work, 0 dead letters{said}"


def test_a_push_that_failed_and_a_fleet_that_is_held_are_found(system: ExaminedSystem) -> None:
    system.server.refuse = True
    try:
        body = {"version": 1, "location": (system.directory / "policies" / "v00000001").as_uri()}
        system.admin("POST", "/admin/policies", body)
        assert "the push of version 1 failed" in system.problems()["push_failed"]
        system.admin("POST", "/admin/policies/hold", {"reason": "a look at version 1"})
        assert system.problems()["fleet_held"].endswith(": a look at version 1")
    finally:
        system.server.refuse = False
        system.admin("POST", "/admin/policies/0/promote")
    wait_until(lambda: system.problems() == {})


def test_an_engine_that_serves_what_it_may_not_is_found(system: ExaminedSystem) -> None:
    system.server.version, system.server.refuse = 7, True
    try:
        wait_until(lambda: "server_behind" in system.problems())
    finally:
        system.server.version, system.server.refuse = 0, False
    wait_until(lambda: system.problems() == {})


def test_what_the_gateway_warns_of_is_passed_on(system: ExaminedSystem) -> None:
    system.report(last_seen=time.time() - 500)
    assert system.problems()["gateway_warns"].startswith("the trainer has been silent for 50")


def test_two_redis_servers_are_found(system: ExaminedSystem, redis_url: str) -> None:
    found = system.problems(redis_url=redis_url.removesuffix("0") + "7")
    assert "they use two Redis servers" in found["trainers_differ"]


def test_the_settings_of_a_run_are_known_with_their_defaults(tmp_path: Path) -> None:
    from weir.doctor.targets import settings_known

    (tmp_path / "weir.yaml").write_text("gateway: {port: 8123}\ntrainer: null\n")
    known: Any = settings_known(tmp_path / "weir.yaml")
    assert (known["gateway"]["port"], known["gateway"]["host"]) == (8123, "127.0.0.1")
    assert known["trainer"]["keep_checkpoints"] == 2
    assert known["gateway"]["retention_s"] == GatewaySettings.model_fields["retention_s"].default
