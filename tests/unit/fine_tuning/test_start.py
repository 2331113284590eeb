"""What the service refuses at its start."""

from pathlib import Path

import pytest

from fine_tuning.__main__ import main


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("{sampling: {n: 2}}", "fine_tuning.sampling: .*n cannot be set here"),
        ("{client_keys: [guest]}", "fine_tuning.admin_keys: set one"),
    ],
)
def test_settings_that_can_serve_nobody_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, reason: str
) -> None:
    for name in ("WEIR_CLIENT_KEYS", "WEIR_ADMIN_KEYS"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "weir.yaml"
    file.write_text(f"fine_tuning: {section}")
    monkeypatch.setenv("WEIR_CONFIG", str(file))
    monkeypatch.setattr("sys.argv", ["fine_tuning"])
    with pytest.raises(SystemExit, match=reason):
        main()
