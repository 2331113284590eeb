"""The real Helm, in the environment that `make run/helm/env/installed` makes."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tests.support.kubernetes.rendered import ROOT, Object

PYTHON = ROOT / "run" / "helm" / "env" / "bin" / "python"
ANSWER = """
import json, sys
import helm_python as helm
chart = helm.Chart.load(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    try:
        if asked["lint"]:
            answer = helm.lint(sys.argv[1], asked["values"], strict=True)
        else:
            answer = chart.render(asked["values"], name="weir", namespace=asked["namespace"])
    except helm.HelmError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Refused(Exception):
    """Helm's sentence about values."""


class Helm:
    """A process of Helm's own library with one chart."""

    def __init__(self, chart: Path) -> None:
        command = [str(PYTHON), "-c", ANSWER, str(chart)]
        self._process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)

    def __enter__(self) -> "Helm":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def render(self, values: Mapping[str, Any], namespace: str = "weir") -> list[Object]:
        """The objects that a release of the chart has with these values. Raises: Refused."""
        files = self._ask(values=values, namespace=namespace, lint=False)
        text = files["weir/templates/objects.yaml"]
        return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]

    def lint(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask(values=values, lint=True)

    def _ask(self, **asked: Any) -> dict[str, Any]:
        given, answers = self._process.stdin, self._process.stdout
        assert given is not None
        assert answers is not None
        given.write(json.dumps(asked) + "\n")
        given.flush()
        answer: dict[str, Any] = json.loads(answers.readline())
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer


def why_no_helm() -> str | None:
    """Why nothing can be rendered by Helm here; None if it can."""
    return None if PYTHON.exists() else "Helm is missing: make run/helm/env/installed"
