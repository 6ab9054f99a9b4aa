"""Triton's generate extension for models of tensors: the keys of a JSON object are inputs, outputs and parameters."""

import json
from collections.abc import Mapping
from typing import Any

from dragoman.core.calls import Infer, Inference, ModelDescription, Response
from dragoman.core.datatypes import BOOL, BYTES
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import Shape, TensorSpec
from dragoman.formats import fast_json
from dragoman.formats.body import parse_request, serialize_tensors
from dragoman.formats.json_text import json_chunks
from dragoman.protocols.open_inference.extensions import check_call
from dragoman.protocols.wire import Buffer, Policy


def parse_generate_object(text: bytes) -> dict[str, Any]:
    """Return the object of a body that was checked before. Raises InvalidInput for a key that occurs twice."""
    value: dict[str, Any] = parse_json(text, object_pairs_hook=_unique)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise InvalidInput(f"input '{name}' already exists in request")
        values[name] = value
    return values


def infer_call(body: Mapping[str, Any], model: ModelDescription, policy: Policy) -> tuple[Infer, str]:
    """Return the inference that a generate request asks for, and the id of the request.

    Every key that names an input becomes that tensor, every other key a parameter; those of the object `parameters`
    count as the others. Raises InvalidInput naming the key.
    """
    nested = body.get("parameters")
    if nested is not None and not isinstance(nested, dict):
        raise InvalidInput("Expected JSON object for keyword: 'parameters'")
    inputs: list[dict[str, Any]] = []
    parameters: dict[str, Any] = {}
    top = [(name, value) for name, value in body.items() if name != "parameters"]
    for name, value in (*top, *(nested or {}).items()):
        spec = model.signature.input(name)
        if any(tensor["name"] == name for tensor in inputs):
            raise InvalidInput(f"input '{name}' already exists in request")
        if spec is not None:
            inputs.append(_input(spec, value))
        elif name == "id" or value is None:
            continue
        elif isinstance(value, dict | list):
            where = "Converting keyword: 'parameters': " * (name in (nested or {}))
            raise InvalidInput(f"{where}parameter '{name}' has invalid type.{_expected_types(model)}")
        else:
            parameters[name] = value
    id_ = body.get("id")
    if not isinstance(id_, str | None) and model.signature.input("id") is None:
        raise InvalidInput("'id': attempt to access JSON non-string as string")
    document = {"inputs": inputs, "parameters": parameters}
    parsed = parse_request(json.dumps(document, ensure_ascii=False).encode(errors="surrogatepass"), None, policy)
    call = Infer(parsed.inputs, (), parsed.parameters)
    check_call(call, policy)
    return call, id_ if isinstance(id_, str) else ""


def _expected_types(model: ModelDescription) -> str:
    names = ", ".join(f"'{spec.name}'" for spec in model.signature.inputs)
    return f" It should be either 'int', 'bool', or 'string'; the inputs of the model are {names or 'unknown'}"


def _input(spec: TensorSpec, value: Any) -> dict[str, Any]:
    """Return an input of an inference request from a value or a list of values, which may be nested."""
    elements, shape = _flatten(value), _nested_shape(value)
    for element in elements:
        if spec.datatype is BYTES and not isinstance(element, str):
            raise InvalidInput(f"input '{spec.name}': attempt to access JSON non-string as string")
        if spec.datatype is BOOL and not isinstance(element, bool):
            raise InvalidInput(f"input '{spec.name}': attempt to access JSON non-boolean as boolean")
    if spec.shape is not None and not (len(shape) > 1 and spec.fits(shape)):
        shape = _fill_shape(spec.name, spec.shape, len(elements))
    datatype = "FP32" if spec.datatype is None else spec.datatype.name
    return {"name": spec.name, "datatype": datatype, "shape": shape, "data": elements}


def _fill_shape(name: str, shape: Shape, count: int) -> tuple[int, ...]:
    """Return the shape of `count` elements: the last free axis takes what fixed axes leave, other free axes are 1."""
    filled: list[int] = []
    is_taken = False
    for length in reversed(shape):
        if length == -1:
            filled.append(1 if is_taken else -1)
            is_taken = True
        else:
            filled.append(length)
    filled.reverse()
    fixed = 1
    for length in filled:
        fixed *= length if length != -1 else 1
    rest = count // fixed if fixed else 0
    if (count % fixed if fixed else count) or (not is_taken and rest != 1 and fixed):
        raise InvalidInput(
            f"The schema can not convert input '{name}' to tensor with proper shape: expected shape {list(shape)}, got "
            f"{count} elements"
        )
    return tuple(rest if length == -1 else length for length in filled)


def _nested_shape(value: Any) -> tuple[int, ...]:
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _flatten(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    if not any(isinstance(item, list) for item in value):
        return value
    return [element for item in value for element in _flatten(item)]


def generate_response(response: Response[Inference], id_: str, policy: Policy) -> bytes:
    """Return the outputs and parameters of a response as one JSON object; an output of one element is not a list."""
    inference = response.answer
    body: dict[str, Any] = {"id": id_} if id_ else {}
    body["model_name"] = response.model
    if response.version:
        body["model_version"] = response.version
    rows, _ = serialize_tensors(inference.outputs, lambda _: False, policy)
    body |= {row["name"]: _value(row["data"], inference.outputs[row["name"]].shape) for row in rows}
    return b"".join(json_chunks({**body, **inference.parameters}))


def _value(data: Any, shape: tuple[int, ...]) -> Any:
    """Return the data of an output, without brackets if it is one element."""
    count = 1
    for length in shape:
        count *= length
    if count != 1:
        return data
    text: Buffer = b"".join(json_chunks(data))
    return fast_json.Fragment(bytes(text)[1:-1])
