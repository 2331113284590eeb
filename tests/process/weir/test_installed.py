"""The files of a release, and the commands of a Weir that was installed from them by name."""

import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.support.packages import ROOT
from weir import installing
from weir.installing import Installation, InstallationFailed

PATHS = ("PYTHONPATH", "WEIR_INSTALL_DIR", "WEIR_WHEELS", "WEIR_TORCH")

CHART = [] if shutil.which("kubectl") else ["--no-chart"]


def released(out: Path) -> Path:
    command = [sys.executable, str(ROOT / "deploy" / "release.py"), "--untagged", "--out", str(out), *CHART]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released(tmp_path_factory.mktemp("release") / "files")


@pytest.fixture(scope="module")
def wheel(release: Path) -> Path:
    return next(release.glob("*.whl"))


def environment_with(wheel: Path, folder: Path, python: str = sys.executable) -> Path:
    """The folder of programs of an environment that has the wheel, and nothing else."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with(wheel, tmp_path_factory.mktemp("installed") / "env")


def python_3_12() -> str:
    """A Python 3.12 of this machine. Without one, the test is skipped."""
    versions = Path.home().glob(".pyenv/versions/3.12.*/bin/python")
    for each in [shutil.which("python3.12"), *map(str, versions)]:
        if each and subprocess.run([each, "-V"], capture_output=True, check=False).returncode == 0:
            return each
    pytest.skip("this machine has no Python 3.12")


def run(*command: str | Path, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in PATHS}
    own |= {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), **variables}
    return subprocess.run(
        [*map(str, command)], env=own, cwd=home, capture_output=True, text=True, check=False
    )


def test_two_releases_of_a_commit_have_the_same_bytes(release: Path, tmp_path: Path) -> None:
    again = released(tmp_path / "again")
    names = sorted(path.name for path in release.iterdir())
    assert sorted(path.name for path in again.iterdir()) == names
    assert filecmp.cmpfiles(release, again, names, shallow=False) == (names, [], [])


def test_the_checksums_are_those_of_the_files(release: Path) -> None:
    files = sorted(path for path in release.iterdir() if path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    assert (release / "SHA256SUMS").read_text().splitlines() == sums
    suffixes = [".txt", ".whl", ".json", ".gz"]
    assert [path.suffix for path in files] == ([] if CHART else [".tgz"]) + suffixes


def test_the_source_distribution_makes_the_same_wheel(release: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(next(release.glob("*.tar.gz"))) as files:
        files.extractall(tmp_path, filter="data")
        made_at = str(files.getmembers()[0].mtime)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "out")],
        cwd=next(tmp_path.glob("weir_rl-*")),
        env=os.environ | {"SOURCE_DATE_EPOCH": made_at},
        check=True,
        capture_output=True,
    )
    assert filecmp.cmp(tmp_path / "out" / wheel.name, wheel, shallow=False)


def test_the_bill_of_materials_names_every_locked_file(release: Path) -> None:
    bill = json.loads(next(release.glob("*.cdx.json")).read_text())
    known = {digest["content"] for each in bill["components"] for digest in each["hashes"]}
    locks = ("all", "build", "engine-cpu", "engine-cuda", "torch-cpu", "torch-cuda")
    texts = [(ROOT / "deploy" / "requirements" / f"{lock}.txt").read_text() for lock in locks]
    assert known == {word.split(":")[1] for text in texts for word in text.split() if "sha256:" in word}
    fastapi = next(each for each in bill["components"] if each["name"] == "fastapi")
    assert fastapi["licenses"] == [{"license": {"name": "MIT"}}]


def test_a_wheel_brings_one_importable_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    assert {name.split("/")[0] for name in names} == {
        "weir",
        f"{'-'.join(wheel.name.split('-')[:2])}.dist-info",
    }
    assert "weir/_services/gateway/page/assets/index.html" in names
    assert "weir/stack/start-redis.sh" in names


def test_a_new_installation_says_what_it_can_do_and_makes_nothing(installed: Path, tmp_path: Path) -> None:
    for asked in ([], ["--help"]):
        shown = run(installed / "weir", *asked, home=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert "weir demo" in shown.stdout
        assert str(tmp_path / "data" / "weir") in shown.stdout
    assert run(installed / "weir", "--version", home=tmp_path).stdout.startswith("weir 0.")
    assert run(installed / "python", "-c", "import gateway", home=tmp_path).returncode == 1
    assert not [*tmp_path.iterdir()]


def test_the_wheel_can_be_read_by_python_3_12(wheel: Path, tmp_path: Path) -> None:
    programs = environment_with(wheel, tmp_path / "env", python_3_12())
    assert "weir demo" in run(programs / "weir", home=tmp_path).stdout
    package = next((tmp_path / "env" / "lib").glob("python3*/site-packages/weir"))
    compiled = run(programs / "python", "-W", "error", "-m", "compileall", "-qf", package, home=tmp_path)
    assert (compiled.returncode, compiled.stdout) == (0, "")


def test_a_service_that_is_not_known_is_one_sentence(installed: Path, tmp_path: Path) -> None:
    refused = run(installed / "weir", "service", "gatway", home=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "runs one of gateway, rollout_server," in refused.stderr


def test_with_all_packages_commands_run_where_they_are(installed: Path, tmp_path: Path) -> None:
    """As after `pip install weir-rl[all]`: this environment gets the packages of the tests' own."""
    site = next((installed.parent / "lib").glob("python3*/site-packages"))
    (site / "all.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    try:
        config = run(installed / "weir", "config", home=tmp_path)
        assert config.returncode == 0, config.stderr
        assert {"gateway", "trainer", "stack"} <= yaml.safe_load(config.stdout).keys()
        service = run(installed / "weir", "service", "trainer_service", "--help", home=tmp_path)
        assert (service.returncode, "usage: " in service.stdout) == (0, True), service.stderr
        sources = "import weir, sys; print(weir.__file__, [*filter(lambda x: 'work' in x, sys.path)])"
        assert str(site) in run(installed / "python", "-c", sources, home=tmp_path).stdout
    finally:
        (site / "all.pth").unlink()


def test_a_users_program_needs_httpx_alone_and_may_have_packages_of_our_names(
    installed: Path, tmp_path: Path
) -> None:
    site = next((installed.parent / "lib").glob("python3*/site-packages"))
    ours = Path(sysconfig.get_path("purelib"))
    names = ("anyio", "certifi", "h11", "httpcore", "httpx", "idna", "sniffio", "typing_extensions.py")
    for name in names:
        if (ours / name).exists():
            (site / name).symlink_to(ours / name)
    (tmp_path / "environments.py").write_text("MINE = True\n")
    program = (
        "import sys, weir, environments; weir.session; print(environments.MINE, weir.client.__file__); "
        + ("print({'gateway', 'openai', 'redis', 'rollout_queue', 'typer'} & {*sys.modules})")
    )
    try:
        shown = run(installed / "python", "-c", program, home=tmp_path)
        asked = run(installed / "python", "-c", "import weir; weir.session().__enter__()", home=tmp_path)
    finally:
        for name in names:
            (site / name).unlink(missing_ok=True)
    assert shown.stdout.startswith(f"True {site}"), shown.stderr
    assert shown.stdout.splitlines()[1] == "set()"
    assert "GatewayFault: no gateway is known" in asked.stderr


def tiny_wheel(folder: Path, name: str) -> str:
    """A wheel with one empty module, and the lock that installs it."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    facts = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr(f"{name}.py", "")
        files.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        files.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{facts}/RECORD", f"{name}.py,,\n")
    return f"{name}==1.0 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def test_an_installation_checks_hashes_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, locks = tmp_path / "wheels", tmp_path / "locks"
    wheels.mkdir()
    locks.mkdir()
    names = {"build": "tools", "all": "services", "torch-cpu": "tensors", "torch-cuda": "tensors"}
    for lock, name in (names | {"engine-cpu": "engine"}).items():
        (locks / f"{lock}.txt").write_text(tiny_wheel(wheels, name))
    monkeypatch.setattr(installing, "LOCKS", locks)
    monkeypatch.setattr(installing, "NEEDED_BYTES", {"cpu": 0, "cuda": 0})
    wanted = Installation(tmp_path / "own", "cpu", wheels=wheels)
    good = (locks / "engine-cpu.txt").read_text()
    (locks / "engine-cpu.txt").write_text(good.replace("sha256:", "sha256:0")[:-2] + "\n")
    with pytest.raises(InstallationFailed, match=r"could not install SGLang.*HASH"):
        wanted.make()
    assert "5 of 5: installing SGLang into .venv-engine\n" in capsys.readouterr().err
    (locks / "engine-cpu.txt").write_text(good)
    # An earlier pip was killed while it installed this package.
    site = next((wanted.directory / ".venv-engine" / "lib").glob("python3*/site-packages"))
    (site / "engine-1.0.dist-info").mkdir()
    (site / "engine-1.0.dist-info" / "METADATA").write_text("Name: engine\nVersion: 1.0\n")
    wanted.make()
    assert "once: 1 steps" in capsys.readouterr().err
    for python, modules in (
        (wanted.python, "tools, services, tensors, weir"),
        (wanted.engine_python, "engine"),
    ):
        found = run(
            python, "-P", "-c", f"import {modules}; print({modules.split(', ')[-1]}.__file__)", home=tmp_path
        )
        assert str(wanted.directory) in found.stdout, found.stderr
    wanted.make()
    assert capsys.readouterr().err == ""
    wanted.download(tmp_path / "loaded")
    assert sorted(path.name for path in (tmp_path / "loaded").iterdir()) == sorted(
        path.name for path in wheels.iterdir()
    )


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (
            {"WEIR_WHEELS": "/nowhere"},
            "there is no directory /nowhere: `weir install --download DIR` makes one",
        ),
        ({"WEIR_TORCH": "rocm"}, "WEIR_TORCH is 'rocm': set it to cpu or cuda"),
        ({"WEIR_INSTALL_DIR": "/proc/weir"}, "/proc/weir cannot be written"),
    ],
)
def test_what_an_installation_lacks_is_one_sentence(
    installed: Path, tmp_path: Path, variables: dict[str, str], sentence: str
) -> None:
    refused = run(installed / "weir", "demo", home=tmp_path, **variables)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert sentence in refused.stderr
