"""Runs pods as containers of a Docker engine, and asks their probes, as a kubelet does.

One container at a time: the pod's init containers, one after the other, then its main one. Names of
Services are aliases in a network. The agents' network has the gateway only while it is ready, as its Service.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.kubernetes.docker import DockerFailed, Run, docker
from tests.support.kubernetes.pods import Pod, environment, ports
from tests.support.kubernetes.policies import chosen
from tests.support.kubernetes.rendered import Object, of_kind
from tests.support.kubernetes.volumes import Volumes

ASK = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=float(sys.argv[2]))"
DOOR = "gateway"
"""The Service that agents use. They are in a network of their own, which ready gateways join."""
POLL_S = 1.0


class ContainerDied(AssertionError):
    """A container ended, or its probe says that it does not live."""


@dataclass
class Probed:
    """What a pod's main container has answered to one of its probes."""

    probe: dict[str, Any]
    failures: int = 0
    asked_at: float = 0.0
    passed: bool = False

    def due(self) -> bool:
        return time.monotonic() - self.asked_at >= float(self.probe["periodSeconds"])

    def note(self, passed: bool) -> None:
        self.asked_at = time.monotonic()
        self.passed = passed
        self.failures = 0 if passed else self.failures + 1

    @property
    def failed(self) -> bool:
        return self.failures >= int(self.probe["failureThreshold"])


@dataclass
class PodRun:
    """A pod that was started."""

    pod: Pod
    mounts: dict[str, list[str]]
    container: str = ""
    begun: int = 0
    """How many of its containers were started."""
    ready: bool = False
    probes: dict[str, Probed] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        return self.begun == len(self.pod.containers)


class Node:
    """A machine with the pods of one namespace."""

    def __init__(self, run: Run, objects: list[Object]) -> None:
        self._run = run
        self._services = of_kind(objects, "Service")
        self._volumes = Volumes(run, objects)
        self.inside, self.door = run.named("inside"), run.named("door")
        self.pods: dict[str, PodRun] = {}
        for network in (self.inside, self.door):
            docker("network", "create", "--internal", "--label", run.label, network)

    def fill(self, claim: str, folder: Path, under: str) -> None:
        """Put the files of a folder on the volume of a claim, in a directory of this name."""
        files = {f"{under}/{path.name}": (path.read_bytes(), 0o644) for path in sorted(folder.iterdir())}
        self._volumes.claim(claim, files)

    def start(self, *pods: Pod) -> None:
        for pod in pods:
            self.pods[pod.name] = run = PodRun(pod, self._volumes.options(pod))
            run.probes = {name: Probed(value) for name, value in pod.main.items() if name.endswith("Probe")}
            self._next_container(run)

    def wait(self, reached: Callable[[], bool], within_s: float) -> None:
        """Be the kubelet until this is reached. Raises ContainerDied or TimeoutError."""
        deadline = time.monotonic() + within_s
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not reached: { ({name: run.ready for name, run in self.pods.items()}) }")
            for run in self.pods.values():
                self._advance(run)
            time.sleep(POLL_S)  # as a kubelet, which asks again and again

    def ready(self, *names: str) -> bool:
        return all(self.pods[name].ready for name in names)

    def succeeded(self, name: str) -> bool:
        """Whether a Job's pod has ended well."""
        run = self.pods[name]
        return run.is_last and state(run.container) == ("exited", 0)

    def end(self, name: str) -> tuple[str, int]:
        """SIGTERM, and SIGKILL after the pod's grace period. Returns the state with the exit status."""
        run = self.pods.pop(name)
        docker("stop", run.container)
        return state(run.container)

    def ask(self, name: str, url: str) -> str:
        """The body of an answer, asked from inside a pod."""
        words = [
            "python",
            "-c",
            "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())",
        ]
        return docker("exec", self.pods[name].container, *words, url)

    def _advance(self, run: PodRun) -> None:
        status, code = state(run.container)
        if status != "running":
            if code != 0 or (run.is_last and run.probes):
                raise ContainerDied(f"{run.pod.workload} ended with {code}")
            if not run.is_last:
                self._next_container(run)
            return
        if run.is_last and run.probes:
            self._probe(run)

    def _probe(self, run: PodRun) -> None:
        start, live, ready = (run.probes[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
        if not start.passed:
            if start.due():
                start.note(self._passes(run, start.probe))
            asked = [start]
        else:
            for probed in (live, ready):
                if probed.due():
                    probed.note(self._passes(run, probed.probe))
            asked = [live]
        if any(probed.failed for probed in asked):
            raise ContainerDied(f"{run.pod.workload} fails its probe, and would be started again")
        if ready.passed and not run.ready:
            run.ready = True
            if DOOR in self._names(run.pod):
                docker("network", "connect", "--alias", DOOR, self.door, run.container)

    def _passes(self, run: PodRun, probe: dict[str, Any]) -> bool:
        words = probe.get("exec", {}).get("command")
        if words is None:
            get = probe["httpGet"]
            port = ports(run.pod.main)[get["port"]]
            url = f"http://{address(run.container, self.inside)}:{port}{get['path']}"
            words = ["python", "-c", ASK, url, str(probe["timeoutSeconds"])]
        try:
            docker("exec", run.container, *words)
        except DockerFailed:
            return False
        return True

    def _names(self, pod: Pod) -> list[str]:
        """The Services that choose this pod."""
        services = self._services.items()
        return [
            name for name, each in services if chosen({"matchLabels": each["spec"]["selector"]}, pod.labels)
        ]

    def _next_container(self, run: PodRun) -> None:
        pod, container = run.pod, run.pod.containers[run.begun]
        run.begun += 1
        name = self._run.named(f"{pod.name}-{container['name']}")
        main = container is pod.main
        words = ["create", "--name", name, "--hostname", f"{pod.name}-0", "--label", self._run.label]
        agent = "weir/agent" in pod.labels
        words += ["--network", self.door if agent else self.inside]
        for service in self._names(pod) if main and not agent else []:
            words += ["--network-alias", service] if service != DOOR else []
        words += [*confined(pod, container), *limited(pod, container)]
        for mount in container.get("volumeMounts", []):
            kind, option = run.mounts[mount["name"]]
            closed = ",readonly" if mount.get("readOnly") and kind == "--mount" else ""
            words += [kind, option.format(path=mount["mountPath"]) + closed]
        command = [*container.get("command", []), *container.get("args", [])]
        if "command" in container:
            words += ["--entrypoint", command.pop(0)]
        docker(*words, container["image"], *command)
        docker("start", name)
        run.container = name


def confined(pod: Pod, container: dict[str, Any]) -> list[str]:
    """The options of docker for a container's security context."""
    security, own = pod.spec["securityContext"], container["securityContext"]
    words = ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
    words += ["--group-add", str(security["fsGroup"])]
    words += ["--read-only"] if own["readOnlyRootFilesystem"] else []
    words += [word for each in own["capabilities"]["drop"] for word in ("--cap-drop", each)]
    words += [] if own["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges:true"]
    return words


def limited(pod: Pod, container: dict[str, Any]) -> list[str]:
    """The options for memory, time to end, variables, and an init where the pod has one."""
    words = ["--memory", re.sub("i$", "", container["resources"]["limits"]["memory"]).lower()]
    words += ["--stop-timeout", str(pod.spec["terminationGracePeriodSeconds"])]
    words += ["--init"] if pod.spec.get("shareProcessNamespace") else []
    for name, value in environment(container).items():
        words += ["--env", f"{name}={value}"]
    return words


def state(container: str) -> tuple[str, int]:
    """A container's status, with its exit status."""
    status, code = docker("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", container).split()
    return status, int(code)


def address(container: str, network: str) -> str:
    return docker(
        "inspect", "--format", f'{{{{(index .NetworkSettings.Networks "{network}").IPAddress}}}}', container
    ).strip()


@contextmanager
def node(objects: list[Object]) -> Iterator[Node]:
    """Inside the context pods run; afterwards nothing of them is left. If it fails, prints what they said."""
    run = Run()
    made: Node | None = None
    try:
        made = Node(run, objects)
        yield made
    except BaseException:
        for each in made.pods.values() if made is not None else []:
            print(f"--- {each.pod.workload}\n{docker('logs', '--tail', '40', each.container)}")
        raise
    finally:
        run.remove()
