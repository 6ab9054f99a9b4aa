"""Inputs of a model from words of a command line, JSON, and files of NumPy, CSV and JSON."""

import csv
import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import numpy as np

from dragoman.cli.connection import ServerConnection
from dragoman.cli.files import read_file
from dragoman.cli.media import MEDIA_SUFFIXES, Media
from dragoman.cli.models import describe_tensor
from dragoman.cli.table_files import TABLE_SUFFIXES, read_table, split_columns
from dragoman.core import documents
from dragoman.core.datatypes import BYTES, datatype
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.examples import MAX_ELEMENTS, example_inputs
from dragoman.core.options import suggestion
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.formats.csv_table import cell_values, parse_element, parse_float, parse_scalar
from dragoman.formats.message import InferenceRequest

_SUFFIXES = (".npy", ".json", *TABLE_SUFFIXES)


def parse_json(text: str, kind: type, flag: str) -> Any:
    """Return the JSON of a flag. Raises InvalidInput if it is of another type."""
    try:
        value = _load_json(text)
    except ValueError as error:
        raise InvalidInput(f"{flag}: expected JSON, got {text!r}: {error}") from error
    if not isinstance(value, kind):
        raise InvalidInput(f"{flag}: expected {'an object' if kind is dict else 'a list'}, got {text!r}")
    return value


def parse_inputs(words: Sequence[str], data: str | None, signature: Signature, media: Media | None = None) -> Any:
    """Return the inputs of `Client.infer`. Raises InvalidInput that names an unknown input or an invalid value."""
    media = media or Media()
    values: dict[str, Any] = {}
    whole = _all_columns(words, data, signature)
    if data is None and isinstance(whole, str):
        words, data = [], whole
    elif isinstance(whole, list):
        words, values = [], dict(zip((spec.name for spec in signature.inputs), whole, strict=True))
    if data is not None:
        file_values = _read_data(data, signature, media)
        if isinstance(file_values, InferenceRequest):
            return file_values
        values.update(file_values)
    for name, value in _split_words(words, signature):
        if name in values:
            raise InvalidInput(f"input '{name}' has two values")
        values[name] = value
    _check_names(values, signature)
    specs = {spec.name: spec for spec in signature.inputs}
    found = {name: _convert(value, specs.get(name, TensorSpec(name)), media) for name, value in values.items()}
    return media.add_rate(found, signature)


def examples(connection: ServerConnection, model: str, version: str, signature: Signature) -> Iterator[Any]:
    """Yield inputs to try, for `Client.infer`: those that the server has tried itself, else some of declared sizes.

    Raises InvalidInput if none can be made.
    """
    described = _read_example(connection, model, version)
    if isinstance(described, InferenceRequest):
        yield described
        return
    is_any = False
    for inputs in example_inputs(signature if described is None else described):
        is_any = True
        yield inputs
    if not is_any:
        is_declared = all(spec.datatype is not None for spec in signature.inputs) and signature.inputs
        expected = f"one of at most {MAX_ELEMENTS:,} elements can be made" if is_declared else "declared inputs"
        raise InvalidInput(f"the model has no example: expected {expected}, got {_describe_inputs(signature)}")


def fill_inputs(given: Any, candidates: Iterator[Any]) -> Iterator[Any]:
    """Yield the examples with the given inputs in place of their own. Raises InvalidInput for a whole request."""
    if isinstance(given, InferenceRequest):
        raise InvalidInput("--example: expected inputs by name beside it, got a whole request in --data")
    for each in candidates:
        values = each.tensors if isinstance(each, InferenceRequest) else each
        yield {**values, **given} if given else each


def _describe_inputs(signature: Signature) -> str:
    return ", ".join(f"{spec.name} {describe_tensor(spec)}" for spec in signature.inputs) or "none"


def _read_example(connection: ServerConnection, model: str, version: str) -> InferenceRequest | Signature | None:
    """Return the example in the OpenAPI document of a model, or its shapes if it is long; None if there is none."""
    own = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    try:
        with connection.open(f"{own}/openapi.json") as response:
            document = documents.parse_json(response.read())
        body = document["paths"][f"{own}/infer"]["post"]["requestBody"]["content"]["application/json"]
        if "example" in body:
            return InferenceRequest.from_dict(body["example"])
        items = document["components"]["schemas"]["ModelInferRequest"]["properties"]["inputs"]["items"]
        return Signature(tuple(map(_example_spec, items.get("anyOf", [items]))))
    except (DragomanError, ValueError, LookupError, TypeError, AttributeError):
        return None  # another server, another protocol, or a model without an example


def _example_spec(schema: Any) -> TensorSpec:
    """Return an input of the shape of its example. Raises LookupError if it has none."""
    fields = schema["properties"]
    return TensorSpec(schema["title"], datatype(fields["datatype"]["enum"][0]), tuple(fields["shape"]["examples"][0]))


def _split_words(words: Sequence[str], signature: Signature) -> list[tuple[str, Any]]:
    """Return the names of inputs and their raw values. A word for each input may leave out all names."""
    names = [spec.name for spec in signature.inputs]
    if len(words) == len(names) and not any("=" in word for word in words):
        return list(zip(names, words, strict=True))
    return [_split_word(word, signature) for word in words]


def _split_word(word: str, signature: Signature) -> tuple[str, Any]:
    """Return the name of an input and its raw value."""
    name, equals, value = word.partition("=")
    known = [spec.name for spec in signature.inputs]
    if equals and (name in known or name.isidentifier()):
        return name, value
    if len(known) == 1 or (known and word.lower().endswith(MEDIA_SUFFIXES)):
        return known[0], word
    each = f", or a value for each of {len(known)} inputs" if known else ""
    raise InvalidInput(f"expected NAME=VALUE with a name of {', '.join(known) or 'the model'}{each}, got '{word}'")


def _all_columns(words: Sequence[str], data: str | None, signature: Signature) -> str | list[str] | None:
    """Return what one word without a name is for a model of several columns: a table, or a row of values."""
    columns = [spec.shape is None or (len(spec.shape) == 1 or spec.shape[1:] == (1,)) for spec in signature.inputs]
    if len(words) != 1 or data is not None or len(columns) < 2 or not all(columns):
        return None
    if split_columns(words[0])[0].lower().endswith((*TABLE_SUFFIXES, ".json")) and "=" not in words[0]:
        return words[0]
    (row,) = csv.reader([words[0]])
    return row if len(row) == len(columns) and "=" not in words[0] else None


def _check_names(values: Mapping[str, Any], signature: Signature) -> None:
    specs = {spec.name: spec for spec in signature.inputs}
    for name in values:
        if specs and name not in specs and not signature.open_inputs:
            hint = suggestion(name, specs) or f"; expected {', '.join(specs)}"
            raise InvalidInput(f"the model has no input '{name}'{hint}")


def missing_inputs(inputs: Any, signature: Signature) -> str:
    """Return the inputs that a rejected request lacks; "" for none. Metadata do not show which inputs are optional."""
    if isinstance(inputs, InferenceRequest):
        return ""
    missing = [spec for spec in signature.inputs if spec.name not in inputs]
    return ", ".join(f"{spec.name}=... ({describe_tensor(spec)})" for spec in missing)


# --- values ----------------------------------------------------------------------------------------------------------


def _convert(value: Any, spec: TensorSpec, media: Media) -> Any:
    """Return what the client takes for a raw value: a word, a list, or an array. The client converts the numbers."""
    try:
        if isinstance(value, str):
            found = media.read(value, spec) if value.lower().endswith(MEDIA_SUFFIXES) else None
            value = _parse(value, spec, media) if found is None else found
        if isinstance(value, np.ndarray):
            tensor = Tensor.of(value, spec.datatype)
            shape = _declared_shape(tensor.data.size, spec) if value.ndim == 1 else None
            return tensor if shape is None else Tensor(tensor.data.reshape(shape), tensor.datatype)
        values = value if isinstance(value, list) else [value]
        values = [parse_element(each, spec) for each in values]
        if spec.shape == () and len(values) == 1 and not isinstance(values[0], (list, str, bytes)):
            return Tensor.of(np.asarray(values[0]), spec.datatype)  # the client sends numbers as one element, [1]
    except InvalidInput as error:
        raise InvalidInput(f"input '{spec.name}': {error.message}") from error
    shape = _declared_shape(len(values), spec) if not any(isinstance(each, list) for each in values) else None
    return values if shape is None else _nest(values, shape)


def _parse(text: str, spec: TensorSpec, media: Media) -> Any:
    """Return the value of a word: the content of a file, JSON, numbers, or text."""
    if split_columns(text)[0].lower().endswith(_SUFFIXES):
        return _read_file(text, spec, media)
    if spec.datatype is BYTES and not text.startswith(("[", '"')):
        return [text]
    for form in (text, f"[{text}]") if text.strip() else ():
        with suppress(ValueError):
            return _load_json(form)
    values = [parse_scalar(part) for part in text.split(",")]
    if not any(isinstance(value, str) for value in values):
        return values
    if spec.datatype is None:
        return [text]
    suffixes = (*_SUFFIXES, *MEDIA_SUFFIXES)
    raise InvalidInput(f"expected {spec.datatype} as 1,2,3, JSON, or a file ({', '.join(suffixes)}), got {text!r}")


def _load_json(text: str) -> Any:
    """Return the value of JSON. Raises ValueError, and InvalidInput for a number that no float can hold."""
    return documents.parse_json(text, parse_float=parse_float)


def _declared_shape(count: int, spec: TensorSpec) -> list[int] | None:
    """Return the declared shape for a list of values, if they fill it and it has at most one free axis."""
    if spec.shape is None or len(spec.shape) == 1:
        return None
    free = [length for length in spec.shape if length < 0]
    row = math.prod(length for length in spec.shape if length >= 0)
    if len(free) > 1 or not row or count % row or (not free and count != row):
        return None
    return [count // row if length < 0 else length for length in spec.shape]


def _nest(values: list[Any], shape: Sequence[int]) -> Any:
    """Return a list in a shape, as nested lists in row-major order."""
    if not shape:
        return values[0]
    if len(shape) == 1:
        return values
    step = len(values) // shape[0] if shape[0] else 0
    return [_nest(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


# --- files -----------------------------------------------------------------------------------------------------------


def _read_data(data: str, signature: Signature, media: Media) -> Any:
    """Return the values of `--data` by input, or a request of the protocol.

    Columns of a table that the model does not have are left out with a note. Raises InvalidInput if one is missing that
    may be meant by such a column.
    """
    if data == "-":
        return _from_json(sys.stdin.read(), "standard input", signature)
    if data.lstrip().startswith(("{", "[")):
        return _from_json(data, "--data", signature)
    path, columns = split_columns(data)
    if not path.lower().endswith(_SUFFIXES):
        raise InvalidInput(f"--data: expected JSON, -, or a file ({', '.join(_SUFFIXES)}), got '{data}'")
    specs = {spec.name: spec for spec in signature.inputs}
    names = list(specs)
    if path.endswith(".json"):
        return _from_json(read_file(path).decode(errors="replace"), path, signature)
    if path.lower().endswith(TABLE_SUFFIXES):
        table = read_table(path, columns or names)
        table = table.select(columns) if columns else table
        if table.header and (len(names) != 1 or names[0] in table.header):
            known = {name: specs.get(name, TensorSpec(name)) for name in table.header}
            if not signature.open_inputs and specs:
                known = {name: spec for name, spec in known.items() if name in specs}
            others = [name for name in table.header if name not in known]
            missing = [name for name in names if name not in known]
            if others and missing:
                message = f"'{path}' has no column {', '.join(map(repr, missing))}"
                hint = suggestion(missing[0], others) if len(missing) == 1 else ""
                raise InvalidInput(message + (hint or f"; it has {', '.join(map(repr, table.header))}"))
            if others:
                media.notes.append(f"{path}: columns that the model does not have: {', '.join(others)}")
            return {name: cell_values(table.select([name]), spec, media.notes) for name, spec in known.items()}
    return {_only(names): _read_file(data, signature.inputs[0], media)}


def _only(names: Sequence[str]) -> str:
    if len(names) != 1:
        raise InvalidInput(f"--data: expected names of the inputs {', '.join(names)}")
    return names[0]


def _from_json(text: str, source: str, signature: Signature) -> Any:
    try:
        value = _load_json(text)
    except ValueError as error:
        raise InvalidInput(f"{source} is not JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("inputs"), list):
        return InferenceRequest.from_json(text.encode())
    return value if isinstance(value, dict) else {_only([spec.name for spec in signature.inputs]): value}


def _read_file(path: str, spec: TensorSpec, media: Media) -> Any:
    if path.endswith(".npy"):
        try:
            return np.load(io.BytesIO(read_file(path)), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise InvalidInput(f"'{path}' is not an array of numbers in NumPy's format, or is truncated") from error
    if path.endswith(".json"):
        return parse_json(read_file(path).decode(errors="replace"), list, path)
    path, columns = split_columns(path)
    table = read_table(path, columns or [spec.name])
    return cell_values(table.select(columns) if columns else table, spec, media.notes)
