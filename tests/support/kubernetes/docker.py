"""The command `docker`, and what a run makes with it: all has the run's label, by which it is removed."""

import shutil
import subprocess

from rollout_queue.contract.ids import new_id

LABEL = "weir.manifests"
AT_MOST_S = 300.0
"""How long a command may take: the engine answers late where the machine is busy."""


class DockerFailed(Exception):
    """A command of docker failed. The text has what it said."""


def docker(*words: str, given: bytes | None = None) -> str:
    """What the command prints. Raises DockerFailed."""
    done = subprocess.run(
        ["docker", *words], input=given, capture_output=True, check=False, timeout=AT_MOST_S
    )
    if done.returncode != 0:
        raise DockerFailed(f"docker {' '.join(words[:4])}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


def why_no_engine(images: set[str]) -> str | None:
    """Why no containers of these images can be started here; None if they can."""
    if shutil.which("docker") is None:
        return "docker is missing"
    try:
        docker("version", "--format", "{{.Server.Version}}")
    except DockerFailed as error:
        return f"no Docker engine: {error}"
    for image in sorted(images):
        try:
            docker("image", "inspect", "--format", "{{.Id}}", image)
        except DockerFailed:
            return f"the image {image} is missing: docker compose --profile demo build"
    return None


class Run:
    """One run's label, and the names of what it makes."""

    def __init__(self) -> None:
        self.id = new_id()
        self.label = f"{LABEL}={self.id}"

    def named(self, name: str) -> str:
        return f"weir-{self.id}-{name}"

    def remove(self) -> None:
        """Remove all that has the run's label: containers, volumes, networks."""
        mine = ("--filter", f"label={self.label}")
        if containers := docker("ps", "--all", "--quiet", *mine).split():
            docker("rm", "--force", "--volumes", *containers)
        if volumes := docker("volume", "ls", "--quiet", *mine).split():
            docker("volume", "rm", "--force", *volumes)
        if networks := docker("network", "ls", "--quiet", *mine).split():
            docker("network", "rm", *networks)
