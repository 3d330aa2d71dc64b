"""The manifests and the container file: valid by Kubernetes' schemas, consistent, and true of a real server."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ddtree_trt import __version__
from ddtree_trt.triton.export import export_triton
from ddtree_trt.triton.metrics import ENGINE_GAUGES
from tools.triton_server import TritonServer

ROOT = Path(__file__).resolve().parents[3]
OLDEST = "1.31"
MANIFESTS = [
    (path.name, document)
    for path in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]


def one(kind: str, name: str = "ddtree-triton") -> Any:
    return next(d for _, d in MANIFESTS if d["kind"] == kind and d["metadata"]["name"] == name)


POD = one("Deployment")["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("document", [d for _, d in MANIFESTS], ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_manifests_fit_the_schema(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**document, "metadata": {"nme": "x"}}, version, strict=True)


def test_manifests_fit_each_other() -> None:
    labels = POD["metadata"]["labels"]
    assert one("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    ports = {p["name"]: p["containerPort"] for p in CONTAINER["ports"]}
    for name in ("ddtree-triton", "ddtree-triton-pods"):
        assert one("Service", name)["spec"]["selector"] == labels
        assert {p["targetPort"] for p in one("Service", name)["spec"]["ports"]} <= ports.keys()
    autoscaler = one("HorizontalPodAutoscaler")["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == one("Deployment")["metadata"]["name"]
    assert "replicas" not in one("Deployment")["spec"], "the autoscaler owns them"
    assert int(POD["metadata"]["annotations"]["prometheus.io/port"]) == ports["metrics"]
    adapter = yaml.safe_load(one("ConfigMap", "ddtree-triton-prometheus-adapter")["data"]["config.yaml"])
    metric = autoscaler["metrics"][0]["pods"]["metric"]["name"]
    assert metric == adapter["rules"][0]["name"]["as"]
    assert (name := metric.replace("vllm_", "vllm:")) in ENGINE_GAUGES and name in adapter["rules"][0]["seriesQuery"]
    mounted = {m["name"] for m in CONTAINER["volumeMounts"]}
    assert mounted == {v["name"] for v in POD["spec"]["volumes"]}


def test_streams_have_time_to_finish() -> None:
    waiting = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    (timeout,) = (int(a.partition("=")[2]) for a in CONTAINER["args"] if a.startswith("--exit-timeout-secs="))
    assert POD["spec"]["terminationGracePeriodSeconds"] > timeout + waiting


def test_the_container_file_builds_this_version() -> None:
    text = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
    assert f"ddtree-triton:{__version__} ." in text
    assert CONTAINER["image"].endswith(f"ddtree-triton:{__version__}")
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert set(json.loads(command)) <= set(CONTAINER["args"])


@pytest.fixture(scope="module")
def deployed(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with the deployment's options."""
    repository = tmp_path_factory.mktemp("models")
    export_triton(tiny_engine, repository, link=True)
    program, models, *options = CONTAINER["args"]
    assert (program, models) == ("tritonserver", "--model-repository=/models")
    with TritonServer(repository, options) as server:
        yield server


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_are_answered(deployed: TritonServer, probe: str) -> None:
    assert CONTAINER[probe]["httpGet"]["port"] == "http"
    assert deployed.get(CONTAINER[probe]["httpGet"]["path"]) is None


def test_the_autoscaler_s_metric_is_there(deployed: TritonServer) -> None:
    path = POD["metadata"]["annotations"]["prometheus.io/path"]
    with urllib.request.urlopen(f"http://{deployed.metrics_address}{path}", timeout=120) as page:
        names = {line.split("{")[0] for line in page.read().decode().splitlines()}
    wanted = one("HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert wanted.replace("vllm_", "vllm:", 1) in names, "the adapter publishes it without the colon"
