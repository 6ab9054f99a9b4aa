"""Inference of arrays at LMI's paths: JSON, CSV, NumPy's files and DJL's NDList."""

from collections.abc import Callable, Mapping

import numpy as np

from dragoman.core.calls import Infer, Inference, ModelDescription, Request, Response
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.sampling import format_value
from dragoman.core.tensor import Tensor, numpy_numbers
from dragoman.formats.json_document import parse_document
from dragoman.formats.json_text import json_chunks
from dragoman.protocols.json_arrays import (
    call_parameters,
    format_values,
    named_tensors,
    only_input,
    parse_values,
    single_tensor,
)
from dragoman.protocols.parameters import build_request, json_body
from dragoman.protocols.wire import JSON_TYPE, Buffer, EngineCall, HttpRequest, HttpResponse, Policy
from dragoman_text.apis.lmi.binary_arrays import from_ndlist, from_npy, from_npz, to_ndlist, to_npy, to_npz
from dragoman_text.apis.lmi.csv import LONG, are_numbers, check_cells, csv_chunks, numbers_of_csv, parse_rows, to_cells
from dragoman_text.apis.lmi.request import media_type

_INPUT_KEYS = ("inputs", "instances", "data")  # names of the inputs in the requests of clients
_OUTPUT_KEY = "predictions"
_ALTERNATIVE = "send accept: tensor/npz"


def parse_arrays_request(
    http: HttpRequest, model: ModelDescription, policy: Policy
) -> EngineCall[Inference, HttpResponse]:
    """Parse an inference request for a model. Raises InvalidInput naming the input."""
    kind = media_type(http)
    read = READERS.get(kind, _from_json)
    if not len(http.body):
        raise InvalidInput("the request body is empty")
    call = read(http, model, policy)
    write = _writer(http.headers.get("accept", ""), kind)
    request: Request[Inference] = build_request(call, http, policy, model.name)
    return EngineCall(request, lambda response: write(response, policy))


# --- requests ----------------------------------------------------------------------------------------------


def _from_json(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    body = json_body(http.body, policy, parse_document)
    if not isinstance(body, dict):
        return Infer(single_tensor(body, model))
    names = {spec.name for spec in model.signature.inputs}
    if "model_name" not in names:
        body.pop("model_name", None)
    key = next((name for name in _INPUT_KEYS if name in body), None)
    if key is None:
        if body and body.keys() <= names:
            return Infer(named_tensors(body, model))
        result = ", ".join(f"'{name}'" for name in sorted(names)) or "the model's inputs"
        raise InvalidInput(f"expected an object with 'inputs', or with {result}; got {format_value(body)}")
    return Infer(parse_values(body[key], model, key), parameters=call_parameters(body))


def _from_csv(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    several = len([spec for spec in model.signature.inputs if not spec.optional]) > 1
    body = bytes(http.body)
    numbers = numbers_of_csv(body, named=several) if len(body) > LONG else None
    if numbers is not None:
        names, cells = numbers
        if several and names:
            columns = {name: cells[:, i : i + 1] for i, name in enumerate(names)}
            return Infer(named_tensors({name: _column(one, name, model) for name, one in columns.items()}, model))
        return Infer(single_tensor(cells, model))
    check_cells(body, policy)
    rows = parse_rows(_text(body))
    head = rows[0] if several or (len(rows) > 1 and not are_numbers(rows[:1]) and are_numbers(rows[1:])) else None
    rows = rows[1:] if head else rows
    if not rows:
        raise InvalidInput("expected text/csv with rows of values below the line of names")
    if several and head:
        columns = {name: to_cells([row[i : i + 1] for row in rows]) for i, name in enumerate(head)}
        return Infer(named_tensors({name: _column(one, name, model) for name, one in columns.items()}, model))
    return Infer(single_tensor(to_cells(rows), model))


def _column(cells: Array, name: str, model: ModelDescription) -> Array:
    """Convert a column to the shape of the model's input, or to a vector."""
    wide = any(spec.name == name and spec.shape is not None and len(spec.shape) == 2 for spec in model.signature.inputs)
    return cells if wide else cells[:, 0]


def _from_text(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    return Infer(single_tensor(np.array([_text(http.body)], dtype=object), model))


def _from_bytes(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    spec = only_input(model)
    if spec.datatype is BYTES:
        return Infer(single_tensor(np.array([bytes(http.body)], dtype=object), model))
    return Infer({}, raw=bytes(http.body))


def _from_npy(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    return Infer(single_tensor(_check_size(from_npy(bytes(http.body)), policy), model))


def _from_npz(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    arrays = {name: _check_size(array, policy) for name, array in from_npz(bytes(http.body)).items()}
    names = {spec.name for spec in model.signature.inputs}
    if len(arrays) == 1 and not arrays.keys() <= names:  # NumPy's name of an unnamed array is arr_0
        return Infer(single_tensor(next(iter(arrays.values())), model))
    return Infer(named_tensors(arrays, model))


def _from_ndlist(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    """Parse arrays by name, or in the order of the model's inputs. DJL also sends them as `.npz`."""
    body = bytes(http.body)
    if body[:2] == b"PK":
        return _from_npz(http, model, policy)
    arrays, specs = [(name, _check_size(array, policy)) for name, array in from_ndlist(body)], model.signature.inputs
    by_name = dict(arrays)
    if len(by_name) == len(arrays) and by_name.keys() <= {spec.name for spec in specs}:
        return Infer(named_tensors(by_name, model))
    if len(arrays) == 1:
        return Infer(single_tensor(arrays[0][1], model))
    if len(arrays) > len(specs):
        names = ", ".join(f"'{spec.name}'" for spec in specs)
        raise InvalidInput(f"model '{model.name}' takes {names or 'one input'}; got {len(arrays)} arrays")
    return Infer(named_tensors({spec.name: array for spec, (_, array) in zip(specs, arrays, strict=False)}, model))


def _check_size(array: Array, policy: Policy) -> Array:
    """Return the array. Raises InvalidInput if it holds more strings than a BYTES tensor may have elements."""
    if array.dtype.kind in "USO" and array.size > policy.max_bytes_elements:
        raise InvalidInput(f"too many strings: expected at most {policy.max_bytes_elements}, got {array.size}")
    return array


def _text(body: Buffer) -> str:
    try:
        return bytes(body).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the request body is not valid UTF-8: {error.reason}") from error


READERS: Mapping[str, Callable[[HttpRequest, ModelDescription, Policy], Infer]] = {
    "text/csv": _from_csv,
    "text/plain": _from_text,
    "application/octet-stream": _from_bytes,
    "application/x-npy": _from_npy,
    "tensor/npz": _from_npz,
    "application/x-npz": _from_npz,
    "tensor/ndlist": _from_ndlist,
}


def names_format(http: HttpRequest) -> bool:
    """Return whether the request names a format for arrays, by its content type or its Accept header.

    JSON does not count, nor does CSV as the content type of the request.
    """
    accepted = _accepted_type(http.headers.get("accept", ""))
    return media_type(http) in READERS.keys() - {"text/csv"} or accepted not in ("", "application/json")


# --- responses -----------------------------------------------------------------------------------------------


def _writer(accept: str, request_type: str) -> Callable[[Response[Inference], Policy], HttpResponse]:
    """Return the formatter of the first content type that the client accepts; by default JSON, or for tensor formats
    that of the request, as DJL does."""
    return _WRITERS[_accepted_type(accept) or (request_type if request_type in _IN_KIND else "application/json")]


def _accepted_type(accept: str) -> str:
    """Return the first content type of an Accept header that responses may have; "" if there is none."""
    kinds = (part.partition(";")[0].strip().lower() for part in accept.split(","))
    return next((kind for kind in kinds if kind in _WRITERS), "")


def _to_json(response: Response[Inference], policy: Policy) -> HttpResponse:
    value = {
        name: format_values(name, tensor, policy, _ALTERNATIVE) for name, tensor in response.answer.outputs.items()
    }
    body = json_chunks({_OUTPUT_KEY: next(iter(value.values())) if len(value) == 1 else value})
    return HttpResponse(200, body, (JSON_TYPE,))


def _to_csv(response: Response[Inference], policy: Policy) -> HttpResponse:
    tables = [_table(name, tensor) for name, tensor in response.answer.outputs.items()]
    if len({len(each) for each in tables}) > 1:
        raise NotSupported("the outputs have different numbers of rows, which CSV does not support; request JSON")
    return HttpResponse(200, tuple(csv_chunks(tables)), (("content-type", "text/csv"),))


def _table(name: str, tensor: Tensor) -> Array:
    array = numpy_numbers(tensor)
    if array.ndim > 2:
        raise NotSupported(f"output '{name}' has {array.ndim} axes, but CSV supports two; request JSON")
    rows = len(array) if array.ndim else 1
    return array.reshape(rows, array.size // rows if rows else 1)


def _to_npy(response: Response[Inference], policy: Policy) -> HttpResponse:
    if len(response.answer.outputs) > 1:
        return _to_npz(response, policy)
    (tensor,) = response.answer.outputs.values()
    return HttpResponse(200, (to_npy(numpy_numbers(tensor)),), (("content-type", "application/x-npy"),))


def _to_npz(response: Response[Inference], policy: Policy) -> HttpResponse:
    arrays = {name: numpy_numbers(tensor) for name, tensor in response.answer.outputs.items()}
    return HttpResponse(200, (to_npz(arrays),), (("content-type", "tensor/npz"),))


def _to_ndlist(response: Response[Inference], policy: Policy) -> HttpResponse:
    arrays = {name: numpy_numbers(tensor) for name, tensor in response.answer.outputs.items()}
    return HttpResponse(200, (to_ndlist(arrays),), (("content-type", "tensor/ndlist"),))


_WRITERS: Mapping[str, Callable[[Response[Inference], Policy], HttpResponse]] = {
    "application/json": _to_json,
    "text/csv": _to_csv,
    "application/x-npy": _to_npy,
    "tensor/npz": _to_npz,
    "application/x-npz": _to_npz,
    "tensor/ndlist": _to_ndlist,
}
_IN_KIND = ("tensor/npz", "tensor/ndlist")
