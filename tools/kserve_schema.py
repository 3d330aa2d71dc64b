"""Make the schema that the manifest of deploy/kserve is checked against, from KServe's own.

    python tools/kserve_schema.py CRD VERSION

CRD is config/crd/full/serving.kserve.io_inferenceservices.yaml of a release of github.com/kserve/kserve (Apache-2.0),
VERSION that release. Kept are the types of what the manifest uses and the names of everything beside it. Descriptions,
and the types of what it does not use, are left out: the whole has 2 MB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "deploy" / "kserve" / "inferenceservice.yaml"
SCHEMA = ROOT / "tests" / "fixtures" / "kserve_inferenceservice.json"
_KEPT = ("type", "enum", "required", "pattern", "anyOf", "x-kubernetes-int-or-string", "additionalProperties")


def pruned(schema: dict[str, Any], used: Any) -> dict[str, Any]:
    """The part of a schema that a value is checked by; names beside it are kept with any value."""
    kept: dict[str, Any] = {key: schema[key] for key in _KEPT if key in schema}
    if "properties" in schema:
        given = used if isinstance(used, dict) else {}
        kept["properties"] = {
            name: pruned(part, given[name]) if name in given else {} for name, part in schema["properties"].items()
        }
        kept["additionalProperties"] = False
    if "items" in schema:
        kept["items"] = pruned(schema["items"], merged(used))
    return kept


def merged(values: Any) -> Any:
    """What any item of a list uses."""
    items = values if isinstance(values, list) else []
    whole: dict[str, Any] = {}
    for item in (i for i in items if isinstance(i, dict)):
        for name, value in item.items():
            both = isinstance(value, dict) and isinstance(whole.get(name), dict)
            whole[name] = {**whole[name], **value} if both else value
    return whole


def main(crd: Path, version: str) -> None:
    definition = yaml.safe_load(crd.read_text(encoding="utf-8"))
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == "v1beta1")
    schema["properties"]["metadata"] = {"type": "object"}
    kept = {
        "source": f"github.com/kserve/kserve {version}, config/crd/full/serving.kserve.io_inferenceservices.yaml",
        "licence": "Apache-2.0",
        "made_by": "tools/kserve_schema.py",
        "schema": pruned(schema, yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))),
    }
    SCHEMA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
