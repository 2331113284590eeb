"""What the service refuses at its start, and what it does before it takes requests."""

import sys

import pytest

import reward_service.__main__


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the program did, in this order."""
    found = list[str]()
    monkeypatch.setattr(sys, "argv", ["reward_service"])
    monkeypatch.setattr(reward_service.__main__, "hide_from_children", lambda: found.append("hidden"))
    monkeypatch.setattr(reward_service.__main__, "isolates", lambda *_: True)
    monkeypatch.setattr("rollout_queue.starting.serve", lambda *_, **__: found.append("serves"))
    monkeypatch.setattr("rollout_queue.starting.begin_log", lambda *_: None)
    return found


def test_its_memory_is_hidden_before_it_takes_requests(done: list[str]) -> None:
    reward_service.__main__.main()
    assert done == ["hidden", "serves"]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("WEIR_REWARDS__PORT", "x", r"^rewards\.port: "),
        ("WEIR_REWARDS__HOST", "0.0.0.0", r"refusing to listen on 0\.0\.0\.0 without keys"),
        (
            "WEIR_REWARDS__RULES",
            '[{"name": "half", "kind": "python", "source_file": "/nowhere.py"}]',
            r"^rewards\.rules: .*/nowhere\.py",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_named(
    done: list[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=said) as end:
        reward_service.__main__.main()
    assert isinstance(end.value.code, str), "Python prints it, and exits with status 1"
    assert "serves" not in done
