"""Makes the reduced schema of a RayService that `tests/deploy/cluster/test_kuberay.py` holds the manifest to.

    python -m tests.reduced_schema CRD.yaml

`CRD.yaml` is `ray-operator/config/crd/bases/ray.io_rayservices.yaml` of a release of KubeRay (Apache License 2.0). It
has 18,000 lines, nearly all of them Kubernetes' own Pods. Kept is what the manifest uses, and nothing else is let
through: a field that the release does not know is an error here, and a field that the manifest did not use when this
ran fails the test until this is run again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
MANIFEST: Final = ROOT / "deploy" / "kuberay" / "rayservice.yaml"
SCHEMA: Final = ROOT / "tests" / "deploy" / "cluster" / "rayservice_schema.json"
RELEASE: Final = "KubeRay v1.7.0, ray.io_rayservices.yaml, Apache License 2.0; reduced by tests/reduced_schema.py"
_KEPT: Final = (
    "type",
    "enum",
    "format",
    "minimum",
    "maximum",
    "required",
    "anyOf",
    "pattern",
    "x-kubernetes-int-or-string",
)


def reduced(schema: dict[str, Any], used: list[Any], place: str = "") -> dict[str, Any]:
    """The part of `schema` that the values `used` at one place need. KeyError for a field that it does not have."""
    kept = {name: schema[name] for name in _KEPT if name in schema}
    if "properties" in schema:
        kept["properties"] = {}
        kept["additionalProperties"] = False
        for name in sorted({name for value in used for name in value}):
            if name not in schema["properties"]:
                raise KeyError(f"{place}.{name}: this release of KubeRay does not know it")
            inner = [value[name] for value in used if name in value]
            kept["properties"][name] = reduced(schema["properties"][name], inner, f"{place}.{name}")
    elif "additionalProperties" in schema:
        inner = [item for value in used for item in value.values()]
        kept["additionalProperties"] = reduced(schema["additionalProperties"], inner, f"{place}.*")
    elif "items" in schema:
        kept["items"] = reduced(schema["items"], [item for value in used for item in value], f"{place}[]")
    return kept


def main() -> None:
    versions = yaml.safe_load(Path(sys.argv[1]).read_text())["spec"]["versions"]
    (schema,) = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"]
    schema["properties"]["metadata"] = {  # which Kubernetes itself checks
        "type": "object",
        "properties": {"name": {"type": "string"}, "annotations": {"type": "object"}},
    }
    found = {"$comment": RELEASE, **reduced(schema, [yaml.safe_load(MANIFEST.read_text())])}
    SCHEMA.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
