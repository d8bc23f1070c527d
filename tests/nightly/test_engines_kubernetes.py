"""docs/how-to/kubernetes.md: its manifests are valid, fit together, and their commands train on this machine."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT
from support.engines import Machines, free_port, home_is_replaced, replaced

pytestmark = pytest.mark.timeout(900)
PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text("utf-8")
MANIFESTS: list[dict[str, Any]] = [
    manifest for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for manifest in yaml.safe_load_all(block)]
VERSIONS = "1.33", "1.34", "1.35", "1.36", "1.37"


def named(kind: str, name: str) -> dict[str, Any]:
    (manifest,) = (one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return manifest


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    return dict(manifest["spec"]["template"]["spec"])


def validate(manifest: dict[str, Any], version: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, which `make engines` installs")
    assert checker.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str) -> None:
    assert len(MANIFESTS) == 6
    for manifest in MANIFESTS:
        validate(manifest, version)


PATHS = ["spec.backoffLimitPerIndices", "spec.podFailurePolicy.rules.0.act", "spec.template.spec.gpus"]


@pytest.mark.parametrize("path", PATHS)
def test_unknown_field_is_refused(path: str) -> None:
    manifest: Any = copy.deepcopy(named("Job", "homes"))
    place, (*way, last) = manifest, path.split(".")
    for step in way:
        place = place[int(step) if step.isdecimal() else step]
    place[last] = 1
    with pytest.raises(Exception, match=last):
        validate(manifest, VERSIONS[-1])


def test_manifests_fit_together() -> None:
    """No schema sees this."""
    server, service = named("Deployment", "commlayer"), named("Service", "commlayer")
    assert service["spec"]["selector"] == server["spec"]["template"]["metadata"]["labels"]
    assert server["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    (serve,) = pod(server)["containers"]
    ports = [port["containerPort"] for port in serve["ports"]]
    assert [port["port"] for port in service["spec"]["ports"]] == ports == [7000, 7001]
    assert "0.0.0.0:7000" in serve["command"]
    assert serve["command"][serve["command"].index("--advertise") + 1] == service["metadata"]["name"]
    assert "commlayer:7000" in pod(named("Job", "homes"))["containers"][0]["command"]
    assert pod(named("Job", "train"))["subdomain"] == named("Service", "train")["metadata"]["name"]
    claim = named("PersistentVolumeClaim", "commlayer-journal")["metadata"]["name"]
    for manifest in (server, named("Job", "train"), named("Job", "homes")):
        (container,) = pod(manifest)["containers"]
        volumes = {volume["name"]: volume for volume in pod(manifest)["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["keys"]["secret"]["secretName"] == "commlayer-keys"
        assert volumes.get("journal", {}).get("persistentVolumeClaim", {}).get("claimName") in (None, claim)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    result = Machines(tmp_path)
    yield result
    result.close()


@pytest.fixture
def keys(machines: Machines) -> str:
    """The folder of the page's Secret."""
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    (lines,) = re.findall(r"^```\n(commlayer keys init\n.*?)^kubectl ", PAGE, re.MULTILINE | re.DOTALL)
    assert machines.run("keys", "sh", "-ec", lines).wait(100) == 0
    return str(machines.folder / "keys" / "keys" / "nodes" / "cluster")


def test_pods_that_stay_train_as_one_job(machines: Machines, keys: str) -> None:
    shell, option, line = pod(named("Job", "train"))["containers"][0]["command"]
    line = replaced(line, {"--nnodes 4": "--nnodes 2", "--nproc-per-node 8": "--nproc-per-node 1", "train-0.train": "127.0.0.1",
                           "29500": str(free_port())})
    for index in range(2):
        machines.run(f"pod-{index}", shell, option, line, JOB_COMPLETION_INDEX=str(index), COMMLAYER_KEYS=keys)
    for index in range(2):
        machines.says(f"pod-{index}", "saved 10 of 2")
    machines.stop("pod-1")


def test_pod_is_replaced_and_the_server_resumes(machines: Machines, keys: str) -> None:
    port = str(free_port())
    (serve,), (join,) = (pod(one)["containers"] for one in (named("Deployment", "commlayer"), named("Job", "homes")))
    same = {":7000": f":{port}", "/commlayer-keys": keys}
    server = shlex.split(replaced(shlex.join(serve["command"]), same | {
        "--advertise commlayer": "--advertise 127.0.0.1", "--min-workers 8": "--min-workers 1",
        "/journal": str(machines.folder / "journal")}))
    home = shlex.split(replaced(shlex.join(join["command"]), same | {
        "--nproc-per-node 8": "--nproc-per-node 1", " commlayer:": " 127.0.0.1:"}))
    machines.run("server", *server)
    home_is_replaced(machines, lambda name: machines.run(name, *home), ("pod-0", "pod-1"))
    machines.switch_off("server")
    machines.run("server", *server)
    saved = len(re.findall(r"^saved ", machines.output("pod-0"), re.MULTILINE))
    machines.says("pod-0", r"saved \d+ of \d", saved + 3)
    machines.stop("pod-0")
