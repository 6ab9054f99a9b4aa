"""Write the schemas of custom resources from checkouts of the projects that define them.

    python update.py KSERVE KEDA PROMETHEUS_OPERATOR GATEWAY_API

The files are the `openAPIV3Schema` of the resource definitions, without descriptions, defaults and status. All four
projects are licensed under Apache-2.0; the checkouts used were kserve/kserve aaac4e294dae, kedacore/keda 8b4f083ca8c8,
prometheus-operator/prometheus-operator 6adcebc5076c and kubernetes-sigs/gateway-api 4564255ac2c3.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

_KSERVE = "config/crd/full/serving.kserve.io_"
_OPERATOR = "example/prometheus-operator-crd/monitoring.coreos.com_"
_GATEWAY = "config/crd/standard/gateway.networking.k8s.io_"
# The plural name of a resource, the beginning of its file's path in each of the four checkouts, and its version.
RESOURCES = (
    {"clusterservingruntimes": (_KSERVE, "v1alpha1"), "inferenceservices": (_KSERVE, "v1beta1")},
    {"scaledobjects": ("config/crd/bases/keda.sh_", "v1alpha1")},
    {"servicemonitors": (_OPERATOR, "v1"), "prometheusrules": (_OPERATOR, "v1")},
    {"httproutes": (_GATEWAY, "v1"), "grpcroutes": (_GATEWAY, "v1")},
)
_DROPPED = ("x-kubernetes-map-type", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations")


def reduced(value: Any) -> Any:
    """Return a schema without descriptions, defaults and what only an API server uses."""
    if isinstance(value, list):
        return [reduced(each) for each in value]
    if not isinstance(value, dict):
        return value
    selected = {k: v for k, v in value.items() if k not in (*_DROPPED, "default")}
    return {k: reduced(v) for k, v in selected.items() if not (k == "description" and isinstance(v, str))}


def main(*checkouts: str) -> None:
    for checkout, resources in zip(checkouts, RESOURCES, strict=True):
        for name, (path, version) in resources.items():
            write_schema(Path(checkout) / f"{path}{name}.yaml", name, version)


def write_schema(file: Path, name: str, version: str) -> None:
    versions = yaml.safe_load(file.read_text())["spec"]["versions"]
    schema = next(reduced(v["schema"]["openAPIV3Schema"]) for v in versions if v["name"] == version)
    schema["properties"].pop("status", None)
    text = json.dumps(schema, separators=(",", ":"), sort_keys=True).encode()
    (Path(__file__).parent / f"{name}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
