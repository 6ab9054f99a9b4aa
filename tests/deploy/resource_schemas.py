"""Checks of Kubernetes' objects and of custom resources by their schemas, which reject unknown fields."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

KUBERNETES = "1.32"
SCHEMAS = Path(__file__).parent / "schemas"


def check_resource(resource: Any) -> None:
    """Raise a ValidationError if a resource does not match the definition of its kind."""
    _check(json.dumps(resource))


@cache
def _check(text: str) -> None:
    """Check the text of a resource, once: variants of the chart have most of their objects in common."""
    resource = json.loads(text)
    group = resource["apiVersion"].rpartition("/")[0]
    if ("." in group and not group.endswith(".k8s.io")) or group == "gateway.networking.k8s.io":
        _check_custom(resource)
        return
    import kubernetes_validate  # two seconds, as jsonschema

    kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def _check_custom(resource: Any) -> None:
    import jsonschema

    # Not `jsonschema.validate`, which checks the schema itself first: that takes a minute here.
    jsonschema.Draft7Validator(_schema_of(resource["kind"])).validate(resource)


@cache
def _schema_of(kind: str) -> Any:
    schema = closed(json.loads(gzip.decompress((SCHEMAS / f"{kind.lower()}s.json.gz").read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def closed(schema: Any) -> Any:
    """Return a schema that rejects unknown fields, as `kubectl apply` with strict validation does."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not is_open:
        result["additionalProperties"] = False
    return result
