"""Answers in the background: the gateway replies at once, and clients read or cancel the answer by its id."""

from rollout_queue.redis import key_names
from tests.support.gateway.background import PATH, ended, read, start
from tests.support.gateway.gated_engine import let_on
from tests.support.gateway.running import CLIENT_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.waiting import wait_until


def test_an_answer_is_made_while_nobody_waits_and_is_read_by_its_id(gateway: RunningGateway) -> None:
    gateway.engine.script.append("good morning")
    session = gateway.session()
    client = gateway.client(session)
    response = client.responses.create(model="m", input="hi", background=True, instructions="be kind")
    assert response.status == "in_progress"
    wait_until(lambda: client.responses.retrieve(response.id).status == "completed")
    response = client.responses.retrieve(response.id)
    assert (response.output_text, response.instructions) == ("good morning", "be kind")
    assert response.background is True
    (turn,) = gateway.turns(session)
    assert turn["completion_id"] == response.id
    assert response.usage is not None
    assert response.usage.output_tokens == turn["output_len"]
    second = client.responses.create(model="m", input="and?", previous_response_id=response.id)
    assert second.status == "completed"
    # the second request has no instructions
    assert [turn["relation"] for turn in gateway.turns(session)] == ["root", "forks"]


def test_an_answer_in_progress_cannot_be_continued(gated: RunningGateway) -> None:
    told = start(gated)
    reply = gated.post(PATH, {"input": "and?", "previous_response_id": told["id"]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "response_not_complete")
    let_on(gated)
    assert ended(gated, told)["status"] == "completed"


def test_a_cancelled_answer_stops_its_engine_and_is_recorded_as_aborted(gated: RunningGateway) -> None:
    session = gated.session()
    client = gated.client(session)
    response = client.responses.create(model="m", input="hi", background=True)
    wait_until(lambda: gated.engine.requests)
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"
    wait_until(lambda: gated.turns(session))
    (turn,) = gated.turns(session)
    assert (turn["finish_reason"], turn["verdict"]["code"]) == ("abort", "aborted")
    wait_until(lambda: gated.engine.aborted)
    assert client.responses.cancel(response.id).status == "cancelled"


def test_an_answer_is_cancelled_at_another_gateway(gated: RunningGateway, backends: Backends) -> None:
    told = start(gated)
    with backends.gateway() as other:
        wait_until(lambda: other.get("/ready").status_code == 200)
        assert read(other, told)["status"] == "in_progress"
        assert other.post(f"{PATH}/{told['id']}/cancel").json()["status"] == "cancelled"
    wait_until(lambda: gated.turns(told))
    assert gated.turns(told)[0]["finish_reason"] == "abort"
    assert read(gated, told)["status"] == "cancelled"


def test_a_deleted_answer_stops_and_does_not_come_back(gated: RunningGateway) -> None:
    told = start(gated)
    assert gated.call("DELETE", f"{PATH}/{told['id']}").json()["deleted"] is True
    wait_until(lambda: gated.turns(told))
    assert gated.get(f"{PATH}/{told['id']}").status_code == 404


def test_an_answer_of_a_deleted_session_is_not_stored(gated: RunningGateway) -> None:
    told = start(gated, instructions="a secret")
    assert gated.call("DELETE", f"/sessions/{told['session_id']}").status_code == 200
    assert ended(gated, told)["status"] == "failed"
    (kept,) = [gated.redis.get(name) for name in gated.redis.scan_iter(key_names.response("*"))]
    assert b"secret" not in kept  # type: ignore[operator]


def test_a_failed_answer_says_why(gateway: RunningGateway, backends: Backends) -> None:
    with backends.gateway(engines=["http://127.0.0.1:9"]) as lonely:
        told = ended(lonely, start(lonely))
    assert (told["status"], told["error"]["code"], told["output"]) == ("failed", "server_error", [])
    assert told["error"]["message"]


def test_a_cut_answer_is_incomplete(gateway: RunningGateway) -> None:
    gateway.engine.script.append("one two three four five six")
    told = ended(gateway, start(gateway, max_output_tokens=3))
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (told["output"][0]["status"], told["completed_at"]) == ("incomplete", None)


def test_a_request_that_cannot_run_in_the_background_is_a_400(gateway: RunningGateway) -> None:
    for param, value in (("stream", True), ("store", False), ("input", [])):
        reply = gateway.post(PATH, {"input": "hi", "background": True, param: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not list(gateway.redis.scan_iter(key_names.response("*")))


def test_only_answers_in_the_background_are_cancelled(gateway: RunningGateway) -> None:
    told = gateway.post(PATH, {"input": "hi"}).json()
    assert gateway.post(f"{PATH}/{told['id']}/cancel").status_code == 400
    background = ended(gateway, start(gateway))
    assert gateway.post(f"{PATH}/{background['id']}/cancel").json() == background
    assert gateway.post(f"{PATH}/{background['id']}/cancel", key=OTHER_KEY).status_code == 404


def test_answers_in_the_background_are_bounded_in_all_and_per_key(
    gated: RunningGateway, backends: Backends
) -> None:
    with backends.gateway(max_background_answers=3, max_background_answers_per_key=2) as bounded:
        wait_until(lambda: bounded.get("/ready").status_code == 200)
        started = [start(bounded) for _ in range(2)]
        body = {"input": "hi", "background": True}
        for key, status in ((CLIENT_KEY, 429), (OTHER_KEY, 200), (OTHER_KEY, 429)):
            reply = bounded.post(PATH, body, key=key)
            assert reply.status_code == status, reply.text
            if status == 429:
                assert reply.json()["error"]["code"] == "background_limit"
                assert int(reply.headers["retry-after"]) >= 1
        assert bounded.refusals == {"background_limit": 2}
        for told in started:
            bounded.post(f"{PATH}/{told['id']}/cancel")
        wait_until(lambda: bounded.post(PATH, body).status_code == 200)
        let_on(gated)
