"""`litellm` as a library: its OpenAI and its Anthropic providers."""

from tests.support.clients.stack import Weir

CLIENT = "litellm"
CALLED_THEN_ANSWERED = [("root", "tool_calls"), ("extends", "stop")]


def test_a_tool_loop_is_one_branch(weir: Weir) -> None:
    session = weir.session()
    assert weir.play(CLIENT, "tool_loop", session) == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED
    assert session.end(reward=1.0) == "ready"


def test_two_calls_at_once_are_one_turn(weir: Weir) -> None:
    session = weir.session()
    assert weir.play(CLIENT, "parallel_calls", session) == {"answer": "7 3"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_header_names_the_session(weir: Weir) -> None:
    session = weir.session()
    said = weir.play(CLIENT, "named_by_header", None, SESSION_ID=session.session_id)
    assert said == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_streamed_tool_loop_is_recorded_as_a_plain_one(weir: Weir) -> None:
    session = weir.session()
    assert weir.play(CLIENT, "stream", session) == {"answer": "7", "finish": "stop"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_an_asynchronous_call_counts_what_was_recorded(weir: Weir) -> None:
    session = weir.session()
    said = weir.play(CLIENT, "asynchronous", session)
    (turn,) = session.turns()
    assert said == {"finish": "tool_calls", "tokens": turn["output_len"]}


def test_its_anthropic_provider_is_served_by_messages(weir: Weir) -> None:
    session = weir.session()
    assert weir.play(CLIENT, "anthropic_protocol", session) == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_errors_are_the_sdks_own(weir: Weir) -> None:
    session = weir.session()
    assert weir.play(CLIENT, "errors", session) == {
        "bad_value": ["BadRequestError", 400],
        "bad_key": ["AuthenticationError", 401],
        "no_such_version": ["NotFoundError", 404],
    }
    assert session.story() == []
