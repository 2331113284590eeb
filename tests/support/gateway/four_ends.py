"""What must hold after every fault around a push: its four ends."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx

from tests.support.gateway.deployment import Fleet, Traffic
from tests.support.rollout_server.weights_sampler import logprob_of_weights
from tests.support.serving import free_port
from tests.support.waiting import wait_until
from weir.audit.audit import audit
from weir.audit.audit_sources import Sources


def check_four_ends(fleet: Fleet, seen: Traffic, version: int) -> None:
    """No call has failed, each recorded token has the version whose weights sampled it, the audit finds
    nothing, and the fleet ends on one version, in the engines, too."""
    assert set(seen.statuses) == {200}, seen.statuses
    wait_until(lambda: ends_on(fleet, version))
    assert not list(wrong_tokens(fleet, seen))
    directory = fleet.directory / "checkpoints"  # a trainer's, if there is one
    directory.mkdir(exist_ok=True)
    sources = Sources(fleet.redis_url, f"http://127.0.0.1:{free_port()}", None, directory)
    assert audit(sources, seen.heard).findings == ()


def ends_on(fleet: Fleet, version: int) -> bool:
    """Whether all gateways, servers and engines agree that this version, and no other, is served."""
    plan = fleet.plan()
    with suppress(httpx.HTTPError):
        said = fleet.versions()
        infos = [f"http://127.0.0.1:{each.engine_port}/model_info" for each in fleet.servers]
        engines = [int(httpx.get(info, timeout=120).json()["weight_version"]) for info in infos]
        everyone = {plan["serving"], plan["target"], *said, *engines, *fleet.gateway_versions()}
        return everyone == {version} and plan["push"]["state"] == "serving"
    return False


def wrong_tokens(fleet: Fleet, seen: Traffic) -> Iterator[str]:
    """The recorded tokens whose version is not the one that sampled them."""
    sampled = fleet.sampled
    for turn in seen.turns():
        assert [span["end"] for span in turn["versions"]][-1] == len(turn["output_ids"])
        for span in turn["versions"]:
            version = span["version"]
            if version not in sampled:
                sampled[version] = logprob_of_weights(files_of(fleet.directory, version))
            said = set(turn["logprobs"][span["start"] : span["end"]])
            if said != {sampled[version]}:
                yield f"{turn['turn_id']}: version {version} did not sample {said}"


def files_of(directory: Path, version: int) -> Path:
    """The published files of a version; the engines start with the model's own."""
    return directory / "policies" / f"v{version:08d}" if version else directory / "model"
