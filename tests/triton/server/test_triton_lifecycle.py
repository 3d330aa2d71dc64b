"""Starting, reloading and stopping: each test has a server of its own."""

import re
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pacing import WAIT_S
from triton_clients import ask, eventually, generate, grpc_stream, metric, text, values

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.triton.export import export_triton
from ddtree_trt.triton.service import ENGINE_GAUGES
from tools.triton_server import TritonServer

PROMPT = "def fib(n):"
SAMPLING: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True, "method": "ar"}


@pytest.fixture(scope="module")
def truth(llm: LLM) -> str:
    return llm.generate(PROMPT, SamplingParams(**SAMPLING))[0].outputs[0].text


class Stream(threading.Thread):
    """A client whose stream has begun; `text` is whole when it has been joined."""

    def __init__(self, server: TritonServer) -> None:
        super().__init__()
        self._server, self.text, self._begun = server, "", threading.Event()
        self.start()
        assert self._begun.wait(WAIT_S)

    def run(self) -> None:
        with grpc_stream(self._server, "tiny", values("tiny", PROMPT, stream=True, **SAMPLING)) as responses:
            for response in responses():
                self.text += text([response])
                self._begun.set()


def test_a_stopping_server_lets_streams_finish(tiny_engine: Path, tmp_path: Path, truth: str) -> None:
    export_triton(tiny_engine, tmp_path, "tiny", link=True)
    server = TritonServer(tmp_path)
    try:
        server.start()
        stream = Stream(server)
        server.signal(signal.SIGTERM)
        stream.join()
        assert stream.text == truth
        assert server.wait() == 0
        assert "Signal (11)" not in server.log
    finally:
        server.kill()


def test_unloading_waits_and_the_model_can_come_back(tiny_engine: Path, tmp_path: Path, truth: str) -> None:
    export_triton(tiny_engine, tmp_path, "tiny", link=True)
    with TritonServer(tmp_path, ["--model-control-mode=explicit", "--load-model=tiny"]) as server:
        stream = Stream(server)
        server.get("/v2/repository/models/tiny/unload", method="POST")
        stream.join()
        assert stream.text == truth
        assert eventually(lambda: server.index()["tiny"].get("reason") == "unloaded")
        with pytest.raises(urllib.error.HTTPError):
            server.get("/v2/models/tiny/ready")
        assert metric(server, "ddtree_slots", "tiny") == 0
        server.get("/v2/repository/models/tiny/load", method="POST", timeout=WAIT_S)
        assert metric(server, "ddtree_slots", "tiny") > 0
        assert text(ask(server, "tiny", values("tiny", PROMPT, stream=True, **SAMPLING))) == truth


def test_instances_share_the_requests(tiny_engine: Path, tmp_path: Path, llm: LLM) -> None:
    export_triton(tiny_engine, tmp_path, "tiny", link=True, instances=2)
    sampling: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    truth = llm.generate(PROMPT, SamplingParams(**sampling))[0].outputs[0].text
    with TritonServer(tmp_path) as server:
        with ThreadPoolExecutor(4) as pool:
            request = values("tiny", PROMPT, stream=True, **sampling)
            texts = list(pool.map(lambda _: text(ask(server, "tiny", request)), range(12)))
        assert texts == [truth] * 12
        assert eventually(lambda: metric(server, "ddtree_requests_total", "tiny") == 12)
        ended = [metric(server, "ddtree_requests_total", "tiny", instance=f"tiny_0_{i}") for i in (0, 1)]
        assert min(ended) > 0


def test_the_readmes_environment_recipe_works(tiny_engine: Path, tmp_path: Path) -> None:
    """Under a python3 without our packages the model says what is missing, and EXECUTION_ENV_PATH brings it."""
    export_triton(tiny_engine, tmp_path, "bare", link=True)
    model = export_triton(tiny_engine, tmp_path, "own-environment", link=True)
    recipe = re.search(r"<<'END'\n(.*?)END\n", (model / "README.md").read_text(), re.DOTALL)
    assert recipe is not None
    with (model / "config.pbtxt").open("a") as config:
        config.write(recipe[1].replace("/opt/ddtree-env", sys.prefix))
    with TritonServer(tmp_path, python=Path(sys.base_prefix) / "bin") as server:
        index = server.index()
        assert "cannot import ddtree-trt: No module named 'ddtree_trt'" in index["bare"]["reason"]
        assert index["own-environment"]["state"] == "READY"
        assert generate(server, "own-environment", {"text_input": PROMPT, "max_tokens": 4})[0] == 200


# The manifests and the container file: valid by Kubernetes' schemas, consistent, and true of a real server


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
    waiting = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    (timeout,) = (int(a.partition("=")[2]) for a in CONTAINER["args"] if a.startswith("--exit-timeout-secs="))
    assert POD["spec"]["terminationGracePeriodSeconds"] > timeout + waiting, "streams have time to finish"


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
