"""Write the schemas of KServe's resources from a checkout of kserve/kserve: `python update.py CHECKOUT`.

The files are the `openAPIV3Schema` of its custom resource definitions, without descriptions, defaults and status.
KServe is licensed under Apache-2.0; the checkout used was commit aaac4e294dae2c7b1aa1886447793f3aa1c30912.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

RESOURCES = {"clusterservingruntimes": "v1alpha1", "inferenceservices": "v1beta1"}
_DROPPED = ("x-kubernetes-map-type", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations")


def reduced(value: Any) -> Any:
    """Return a schema without descriptions, defaults and what only an API server uses."""
    if isinstance(value, list):
        return [reduced(each) for each in value]
    if not isinstance(value, dict):
        return value
    selected = {k: v for k, v in value.items() if k not in (*_DROPPED, "default")}
    return {k: reduced(v) for k, v in selected.items() if not (k == "description" and isinstance(v, str))}


def main(checkout: Path) -> None:
    for name, version in RESOURCES.items():
        file = checkout / f"config/crd/full/serving.kserve.io_{name}.yaml"
        versions = yaml.safe_load(file.read_text())["spec"]["versions"]
        schema = next(reduced(v["schema"]["openAPIV3Schema"]) for v in versions if v["name"] == version)
        del schema["properties"]["status"]
        text = json.dumps(schema, separators=(",", ":"), sort_keys=True).encode()
        (Path(__file__).parent / f"{name}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
