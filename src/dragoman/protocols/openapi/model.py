"""OpenAPI document of one model: its own paths, tensors, and a request that can be sent as it is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from dragoman.core.calls import Generate, Infer, ModelDescription, Tensors
from dragoman.core.datatypes import BYTES, Datatype
from dragoman.core.examples import json_elements, model_example
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.protocols.openapi.document import SCHEMAS

_MODEL, _VERSION = "/v2/models/{model}", "/versions/{version}"
# Longer examples are left out: a page would not show them in reasonable time.
_MAX_EXAMPLE_ELEMENTS = 4096
_Schema = dict[str, Any]


def model_document(document: Mapping[str, Any], model: ModelDescription, version: str) -> dict[str, Any]:
    """Return the document of a model, from that of the server; with a version, that of its paths.

    The document has the operations that the model supports, with the names, datatypes and shapes of its tensors.
    """
    prefix = _MODEL + _VERSION if version else _MODEL
    own = f"/v2/models/{quote(model.name, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    paths = {
        own + pattern.removeprefix(prefix): {method: _own(operation) for method, operation in item.items()}
        for pattern, item in document["paths"].items()
        if pattern.startswith(prefix)
        and (version or not pattern.startswith(_MODEL + _VERSION))
        and _is_supported(pattern.removeprefix(prefix), model)
    }
    schemas = dict(document["components"]["schemas"])
    for suffix in ("/infer", "/infer_stream"):
        if operation := paths.get(own + suffix, {}).get("post"):
            _describe_inference(operation, model, schemas)
    components = {**document["components"], "schemas": _reachable(paths, schemas)}
    info = {"title": model.name, "version": version or (model.versions[-1] if model.versions else "1")}
    if model.platform:
        info["description"] = f"Platform: {model.platform}"
    return {**document, "info": info, "paths": paths, "components": components}


def _own(operation: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operation without the parameters of its path."""
    parameters = [p for p in operation.get("parameters", ()) if p["in"] != "path"]
    rest = {name: value for name, value in operation.items() if name != "parameters"}
    return {**rest, "parameters": parameters} if parameters else rest


def _is_supported(suffix: str, model: ModelDescription) -> bool:
    if suffix.startswith("/generate"):
        return Generate in model.calls
    if suffix == "/infer_stream":
        return Infer in model.calls and model.streams
    return suffix != "/infer" or Infer in model.calls


def _describe_inference(operation: dict[str, Any], model: ModelDescription, schemas: dict[str, _Schema]) -> None:
    """Replace the messages of an inference by those of the model."""
    signature = model.signature
    names = "ModelInferRequest", "ModelInferResponse"
    schemas[names[0]] = _message(
        schemas["InferRequest"], "inputs", _tensors(signature, "inputs", model_example(model) or {})
    )
    schemas[names[1]] = _message(schemas["InferResponse"], "outputs", _tensors(signature, "outputs", {}))
    request = dict(operation["requestBody"]["content"])
    request["application/json"] = {"schema": _reference(names[0])}
    if (example := request_example(model)) is not None:
        request["application/json"]["example"] = example
    operation["requestBody"] = {**operation["requestBody"], "content": request}
    response = operation["responses"]["200"]
    if "application/json" in response.get("content", {}):
        content = {**response["content"], "application/json": {"schema": _reference(names[1])}}
        operation["responses"] = {**operation["responses"], "200": {**response, "content": content}}


def _reference(name: str) -> _Schema:
    return {"$ref": SCHEMAS.format(name=name)}


def _message(general: _Schema, field: str, tensors: _Schema) -> _Schema:
    required = sorted({*general.get("required", ()), field} | ({"model_name"} if field == "outputs" else set()))
    return {**general, "required": required, "properties": {**general["properties"], field: tensors}}


def _tensors(signature: Signature, side: str, examples: Tensors) -> _Schema:
    specs: Sequence[TensorSpec] = getattr(signature, side)
    is_open = signature.unchecked or (
        signature.open_inputs or signature.decodes if side == "inputs" else signature.open_outputs
    )
    alternatives = [_tensor(spec, examples.get(spec.name)) for spec in specs]
    if is_open or not alternatives:
        alternatives.append(_reference("InferTensor"))
    schema: _Schema = {
        "type": "array",
        "items": alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives},
    }
    if side == "inputs" and not is_open:
        schema |= {"minItems": sum(not spec.optional for spec in specs), "maxItems": len(specs)}
    return schema


def _tensor(spec: TensorSpec, example: Tensor | None) -> _Schema:
    datatypes = () if spec.datatype is None else (spec.datatype, *sorted(spec.accepts, key=lambda d: d.name))
    datatype: _Schema = {"enum": [d.name for d in datatypes]} if datatypes else {"type": "string"}
    flat = {"anyOf": [_element(d) for d in datatypes]} if len(datatypes) > 1 else _element(spec.datatype)
    is_flat = spec.shape is not None and len(spec.shape) <= 1
    return {
        "type": "object",
        "title": spec.name,
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"const": spec.name},
            "shape": _shape(spec) if example is None else {**_shape(spec), "examples": [list(example.shape)]},
            "datatype": datatype,
            "parameters": {"type": ["object", "null"]},
            "data": {"type": "array", "items": flat if is_flat else {"anyOf": [flat, {"type": "array"}]}},
        },
    }


def _shape(spec: TensorSpec) -> _Schema:
    free = {"type": "integer", "minimum": 0}
    if spec.shape is None:
        return {"type": "array", "items": free}
    axes = [free if n < 0 else {"const": n} for n in spec.shape]
    schema: _Schema = {"type": "array", "minItems": len(axes), "maxItems": len(axes)}
    return {**schema, "prefixItems": axes} if axes else schema


def _element(datatype: Datatype | None) -> _Schema:
    if datatype is None:
        return {}
    if datatype is BYTES:
        return {"type": "string"}
    if datatype.kind == "bool":
        return {"type": "boolean"}
    if datatype.kind == "float":
        return {"type": ["number", "null"], "description": "null is NaN"}
    limits = np.iinfo(datatype.dtype)
    return {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}


def request_example(model: ModelDescription) -> dict[str, Any] | None:
    """Return an inference request that the model has answered, or for one that was not tried, one of declared sizes.

    None if there is none, or if JSON cannot carry it in reasonable length.
    """
    inputs = model_example(model)
    if inputs is None or sum(math.prod(tensor.shape) for tensor in inputs.values()) > _MAX_EXAMPLE_ELEMENTS:
        return None
    try:
        tensors = [
            {"name": name, "shape": list(t.shape), "datatype": t.datatype.name, "data": json_elements(t)}
            for name, t in inputs.items()
        ]
    except ValueError:
        return None
    return {"inputs": tensors}


def _reachable(paths: Mapping[str, Any], schemas: Mapping[str, _Schema]) -> dict[str, _Schema]:
    """Return the schemas that paths refer to, directly or through others."""
    reachable: dict[str, _Schema] = {}
    waiting = [*_references(paths)]
    while waiting:
        name = waiting.pop()
        if name not in reachable:
            reachable[name] = schemas[name]
            waiting += _references(schemas[name])
    return dict(sorted(reachable.items()))


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == "$ref":
                yield item.rpartition("/")[2]
            else:
                yield from _references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)
