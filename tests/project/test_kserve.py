"""The KServe manifest: valid by KServe's own schema, and the same server as the Deployment beside it."""

import json
from pathlib import Path

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "tests" / "fixtures" / "kserve_inferenceservice.json").read_text(encoding="utf-8"))
MANIFEST = yaml.safe_load((ROOT / "deploy" / "kserve" / "inferenceservice.yaml").read_text(encoding="utf-8"))
DEPLOYMENT = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "deployment.yaml").read_text(encoding="utf-8"))
PREDICTOR = MANIFEST["spec"]["predictor"]
POD = DEPLOYMENT["spec"]["template"]["spec"]


def test_the_manifest_fits_kserve_s_schema() -> None:
    assert "kserve/kserve v" in SCHEMA["source"] and SCHEMA["licence"] == "Apache-2.0"
    jsonschema.Draft202012Validator.check_schema(SCHEMA["schema"])
    jsonschema.validate(MANIFEST, SCHEMA["schema"])


def test_it_is_the_deployment_s_server() -> None:
    (here,), (there,) = PREDICTOR["containers"], POD["containers"]
    assert here["name"] == "kserve-container", "the name by which KServe knows the server"
    for field in ("image", "args", "lifecycle", "resources", "securityContext", "volumeMounts"):
        assert here[field] == there[field], field
    for field in ("volumes", "securityContext", "terminationGracePeriodSeconds"):
        assert PREDICTOR[field] == POD[field], field
    ports = {port["name"]: port["containerPort"] for port in there["ports"]}
    assert here["ports"][0]["containerPort"] == ports["http"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        named = {**here[probe], "httpGet": {**here[probe]["httpGet"], "port": "http"}}
        assert named == there[probe] and here[probe]["httpGet"]["port"] == ports["http"]
    annotations = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
    assert PREDICTOR["annotations"] == annotations
    query = PREDICTOR["autoScaling"]["metrics"][0]["external"]["metric"]["query"]
    assert query.startswith("sum(vllm:num_requests_waiting{") and f"{MANIFEST['metadata']['name']}-predictor-" in query
