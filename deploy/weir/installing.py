"""Makes Weir's own Python environments, for a Weir that was installed by name (`pip install weir-rl`): at the
first command that needs them, or by `weir install`. It imports only the standard library.

locks of the wheel ─▶ .venv         the packages of the services, torch, and a copy of Weir
                  └─▶ .venv-engine  SGLang, which needs other versions of the same packages

Each step installs exactly the files of a lock: pip checks their hashes, and adds no dependencies. A step that
is done is noted in `steps.json`, so that an installation that was interrupted goes on where it was.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

NAME, FILE_NAME = "weir-rl", "weir_rl"
"""Of the distribution, and of its files. The name of the package is taken in the index."""
PACKAGE = Path(__file__).parent
LOCKS = PACKAGE / "locks"
"""Only a wheel has this folder. A checkout has the locks in deploy/requirements, and `make install`."""
COMMAND = "weir install" if LOCKS.is_dir() else "make install"
"""What makes the environments."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index with the CPU build of torch, if WEIR_TORCH_INDEX names no other."""
PYTHONS_WITH_CPU_TORCH = {(3, 11)}
"""For which Pythons torch-cpu.txt has a file."""
NEEDED_BYTES = {"cpu": 8 * 2**30, "cuda": 24 * 2**30}
"""The free disk space that an installation needs, with what pip downloads, by the build of torch."""
ASKED = re.compile(r"\s*(?:Collecting|Requirement already satisfied:|Processing) ")
"""The lines that pip prints once for each package."""
ERROR_LINES = 6

SERVICES = {
    "gateway": ("renderers", "starlette"),
    "rollout_server": ("httpx", "numpy", "starlette"),
    "trainer_service": ("deepspeed", "starlette"),
    "reward_service": ("rapidfuzz", "starlette"),
    "fine_tuning": ("aiohttp", "openai", "psutil", "rapidfuzz", "starlette"),
}
"""The services, and packages by which one sees whether what they import is installed here."""
COMMANDS = ("deepspeed", "openai", "redis", "torch", "typer")
"""The same for the commands."""
LIBRARIES = PACKAGE / "_services" / "environments"
"""The package with the locks of libraries of environments."""
LIBRARIES_DIR = Path("run/environments")
"""Where `weir env` looks for their Pythons (`environments/start_run.py`)."""


class InstallationFailed(Exception):
    """An environment could not be made. The message is a sentence for the user."""


@dataclass(frozen=True)
class LockedStep:
    """The installation of one lock into one environment."""

    environment: str
    lock: str
    what: str

    @property
    def path(self) -> Path:
        return LOCKS / self.lock

    @property
    def name(self) -> str:
        return f"{self.environment}/{self.lock} {_digest(self.path.read_bytes())}"


@dataclass(frozen=True)
class Installation:
    """Both environments in one directory, and where their files come from."""

    directory: Path
    torch: str
    """The build of torch: `cpu` or `cuda`."""
    torch_index: str = CPU_INDEX
    """The index with the CPU build; empty: only those that pip is configured for."""
    wheels: Path | None = None
    """A directory with all files; then nothing is downloaded."""

    @property
    def python(self) -> Path:
        """The interpreter of the services."""
        return self.directory / ".venv" / "bin" / "python"

    @property
    def engine_python(self) -> Path:
        return self.directory / ".venv-engine" / "bin" / "python"

    @property
    def cpu_build(self) -> bool:
        """Whether torch is the CPU build. The one with CUDA is larger, and runs without a GPU, too."""
        return self.torch == "cpu" and sys.version_info[:2] in PYTHONS_WITH_CPU_TORCH

    def steps(self, *, services: bool = True) -> tuple[LockedStep, ...]:
        """All steps in their order, or those of the engine alone. Its lock for a GPU contains torch."""
        lock, what = ("torch-cpu.txt", "torch") if self.cpu_build else ("torch-cuda.txt", "torch with CUDA")
        own = (
            LockedStep(".venv", "build.txt", "the build tools"),
            LockedStep(".venv", "all.txt", "the packages of the services"),
            LockedStep(".venv", lock, what),
        )
        sglang = LockedStep(".venv-engine", f"engine-{self.torch}.txt", "SGLang")
        engine = (LockedStep(".venv-engine", lock, what), sglang) if self.torch == "cpu" else (sglang,)
        return (*own, *engine) if services else engine

    def make(self, *, services: bool = True) -> None:
        """Return once both environments are complete, or that of the engine alone. Raises
        InstallationFailed."""
        wanted, copy = self.steps(services=services), _copied()
        if {*(step.name for step in wanted), *([copy] if services else [])} <= {*self.done()}:
            return
        with self.alone():
            steps = [step for step in wanted if step.name not in self.done()]
            if steps:
                self.check_disk()
                say(
                    f"Weir makes its Python environments in {self.directory}, once: {len(steps)} steps, some "
                    "minutes. If it is interrupted, the next command goes on."
                )
            for number, step in enumerate(steps, 1):
                say(f"{number} of {len(steps)}: installing {step.what} into {step.environment}")
                self.install(step)
            if services and copy not in self.done():
                self.copy_weir()
                self.note(copy)

    def download(self, directory: Path) -> None:
        """Load the files of all steps into a directory of wheels. Raises InstallationFailed."""
        directory.mkdir(parents=True, exist_ok=True)
        steps = self.steps()
        with self.alone():
            if steps[0].name not in self.done():  # pip builds the metadata of what is published as source
                self.install(steps[0])
            for number, step in enumerate(steps, 1):
                say(f"{number} of {len(steps)}: downloading {step.what} for {step.environment}")
                self.pip(".venv", "download", step, "--dest", str(directory.absolute()))

    def install(self, step: LockedStep) -> None:
        """Raises InstallationFailed."""
        environment = self.directory / step.environment
        _make_environment(environment)
        for facts in environment.glob("lib/python3*/site-packages/*.dist-info"):
            if not (facts / "INSTALLER").exists():  # pip writes it last, so this package is incomplete
                shutil.rmtree(facts)
        self.pip(step.environment, "install", step)
        self.note(step.name)

    def pip(self, environment: str, command: str, step: LockedStep, *options: str) -> None:
        """Run pip on a lock, and say how many packages it has found. Raises InstallationFailed."""
        python = self.directory / environment / "bin" / "python"
        words = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", command]
        words += ["--no-deps", "--no-build-isolation", "--require-hashes", "--progress-bar", "off", *options]
        if self.wheels:
            words += ["--no-index", "--find-links", str(self.wheels)]
        elif step.lock == "torch-cpu.txt" and self.torch_index:
            words += ["--extra-index-url", self.torch_index]
        packages = len(re.findall(r"^[\w.-]+==", step.path.read_text(encoding="utf-8"), re.M))
        found, said, printed = 0, 0, list[str]()
        with subprocess.Popen(
            [*words, "-r", str(step.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            close_fds=False,  # pip keeps the lock of `alone` if this process is killed
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process:
            for line in process.stdout or ():
                printed = [*printed, line.strip()][-ERROR_LINES:]
                found += bool(ASKED.match(line))
                if found - said >= max(20, packages // 4):
                    said = found
                    say(f"    {found} of {packages} packages")
        if process.returncode:
            raise InstallationFailed(
                f"pip could not {command} {step.what}, and the next command tries it again; pip said: "
                f"{' / '.join(printed) or 'nothing'}"
            )

    def copy_weir(self) -> None:
        """Put a copy of this Weir into the services' environment, which then does not need the one that was
        installed: that of `uvx` may be removed."""
        command = [str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        target = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        for former in [target / "weir", *target.glob(f"{FILE_NAME}-*.dist-info")]:
            shutil.rmtree(former, ignore_errors=True)
        shutil.copytree(PACKAGE, target / "weir", ignore=shutil.ignore_patterns("__pycache__"))
        facts = Path(str(installed().locate_file(f"{FILE_NAME}-{installed().version}.dist-info")))
        shutil.copytree(facts, target / facts.name)

    def done(self) -> list[str]:
        """The steps that are done, of environments that still exist."""
        try:
            found: list[str] = json.loads((self.directory / "steps.json").read_bytes())
        except (OSError, ValueError):
            return []
        return [
            name for name in found if (self.directory / name.partition("/")[0] / "bin" / "python").exists()
        ]

    def note(self, step: str) -> None:
        """The step is done. It takes the place of one with the same lock."""
        kind = step.partition(" ")[0]
        others = [name for name in self.done() if name.partition(" ")[0] != kind]
        draft = self.directory / ".steps.json"
        draft.write_text(json.dumps([*others, step], indent=1), encoding="utf-8")
        draft.replace(self.directory / "steps.json")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time installs here. Raises InstallationFailed if the directory is read-only."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / "lock").open("a", encoding="ascii")
        except OSError as error:
            raise InstallationFailed(
                f"{self.directory} cannot be written ({error.strerror}): name another one in WEIR_INSTALL_DIR"
            ) from error
        with lock:
            os.set_inheritable(lock.fileno(), True)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process installs into {self.directory}: waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def check_disk(self) -> None:
        """Raises InstallationFailed if two new environments would not fit."""
        free, needed = (
            shutil.disk_usage(self.directory).free,
            NEEDED_BYTES["cpu" if self.cpu_build else "cuda"],
        )
        if free < needed and not self.engine_python.exists():
            raise InstallationFailed(
                f"the disk of {self.directory} has {free / 2**30:.1f} GiB left, and the environments need "
                f"{needed / 2**30:.0f}: free some space, or name another directory in WEIR_INSTALL_DIR"
            )


def installation(
    torch: str | None = None, wheels: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Installation:
    """What the arguments say, else the variables, else this machine. Raises InstallationFailed."""
    if not LOCKS.is_dir():
        raise InstallationFailed("this Weir is a checkout: `make install` makes its environments")
    data = Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    version = f"{installed().version}-python{sys.version_info.major}.{sys.version_info.minor}"
    wheels = wheels or (Path(environ["WEIR_WHEELS"]) if environ.get("WEIR_WHEELS") else None)
    if wheels is not None and not wheels.is_dir():
        raise InstallationFailed(f"there is no directory {wheels}: `weir install --download DIR` makes one")
    torch = torch or environ.get("WEIR_TORCH") or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    if torch not in NEEDED_BYTES:
        raise InstallationFailed(f"WEIR_TORCH is {torch!r}: set it to cpu or cuda")
    return Installation(
        directory=Path(environ.get("WEIR_INSTALL_DIR") or data / "weir" / version).absolute(),
        torch=torch,
        torch_index=environ.get("WEIR_TORCH_INDEX", CPU_INDEX),
        wheels=wheels.absolute() if wheels else None,
    )


def install(arguments: Sequence[str]) -> int:
    """The command `weir install`. Returns its exit code. Raises InstallationFailed."""
    parser = argparse.ArgumentParser(
        prog="weir install",
        description="Make Weir's Python environments now, or load their files for a machine without network.",
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="take the files from here; download none")
    parser.add_argument("--torch", choices=sorted(NEEDED_BYTES), help="the build of torch")
    parser.add_argument("--download", type=Path, metavar="DIR", help="load all files into this directory")
    parser.add_argument(
        "library", nargs="*", help=f"instead, install these libraries of `weir env` into {LIBRARIES_DIR}"
    )
    given = parser.parse_args(arguments)
    wanted = installation(given.torch, given.wheels)
    for library in given.library:
        install_library(library, wanted)
    if given.library:
        return 0
    if given.download:
        wanted.download(given.download)
        say(f"{given.download} has all files: `weir install --wheels {given.download}` needs no network")
    else:
        wanted.make(services=not are_here(COMMANDS))
        say(f"Weir is ready, in {wanted.directory}")
    return 0


def install_library(name: str, wanted: Installation) -> None:
    """Make the Python environment of a library of environments. Raises InstallationFailed."""
    locks = {path.stem: path for path in (LIBRARIES / "requirements").glob("*.txt")}
    if name not in locks:
        raise InstallationFailed(f"there is no library {name!r}, only {', '.join(sorted(locks))}")
    own = replace(wanted, directory=LIBRARIES_DIR.absolute())
    build = LockedStep(name, "build.txt", "the build tools")
    packages = LockedStep(name, os.path.relpath(locks[name], LOCKS), name)
    with own.alone():
        for step in (build, packages):
            if step.name not in own.done():
                say(f"installing {step.what} into {LIBRARIES_DIR / name}")
                own.install(step)
    python = str(own.directory / name / "bin" / "python")
    prepared = subprocess.run([python, str(LIBRARIES / "programs" / "prepare.py"), name], check=False)
    if prepared.returncode:
        raise InstallationFailed(f"{name} is installed, but could not be prepared: see the lines above")
    say(f"{name} is ready, in {LIBRARIES_DIR / name}")


def are_here(packages: Sequence[str]) -> bool:
    """Whether this interpreter has these packages."""
    return all(find_spec(name) is not None for name in packages)


def run_service(arguments: Sequence[str]) -> NoReturn:
    """`weir service NAME`: become the service, here if its packages are here, else in Weir's own environment.
    Raises InstallationFailed."""
    name, options = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name not in SERVICES:
        raise InstallationFailed(f"`weir service NAME` runs one of {', '.join(SERVICES)}")
    if are_here(SERVICES[name]):
        os.execv(sys.executable, [sys.executable, "-m", name, *options])  # noqa: S606 - this very interpreter
    become_own(["service", *arguments])


def become_own(arguments: Sequence[str]) -> NoReturn:
    """Run the same command in Weir's own environment, which is made first. Raises InstallationFailed."""
    own = installation()
    if Path(sys.prefix) == own.directory / ".venv":
        raise InstallationFailed(f"{own.directory} is not complete: remove it, and run `weir install`")
    own.make()
    os.execv(own.python, [str(own.python), "-m", "weir.launcher", *arguments])  # noqa: S606 - our interpreter


def engine_python() -> Path:
    """The interpreter of SGLang: beside this environment, or else in Weir's own directory."""
    beside = Path(sys.prefix).with_name(".venv-engine") / "bin" / "python"
    return beside if beside.is_file() or not LOCKS.is_dir() else installation().engine_python


def installed() -> Distribution:
    """This very Weir, as it was installed."""
    return distribution(NAME)


def say(sentence: str) -> None:
    """Progress, on standard error: what a command prints may be read by a program."""
    print(sentence, file=sys.stderr, flush=True)


def _make_environment(directory: Path) -> None:
    """An empty environment with pip, unless it is there. Raises InstallationFailed."""
    if (directory / "bin" / "python").exists():
        return
    command = [sys.executable, "-m", "venv", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(directory, ignore_errors=True)
        said = " ".join((done.stderr or done.stdout).split())
        raise InstallationFailed(
            f"{sys.executable} cannot make an environment, perhaps without Debian's python3-venv: {said}"
        )


def _copied() -> str:
    """The name of the step that copies this Weir. It says which files are copied."""
    record = (installed().read_text("RECORD") or "").splitlines()
    content = sorted(line for line in record if line.startswith("weir/") and ".pyc" not in line)
    return f".venv/weir {_digest(repr(content).encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
