"""Values that workers send, as MessagePack and raw arrays: decoding them runs no code and creates only known types.

A value is serialized to its head, one byte for its type and then MessagePack, and the memory of its arrays. The server
decodes nothing else from a worker: a worker on another machine, or a model that has taken over its process, could make
pickle run code in the server.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from dragoman.core import errors
from dragoman.core.bytes_tensor import BytesTensor, bytes_from_raw, came_as_text, raw_of, texts_of
from dragoman.core.calls import Embedded, Handled, Inference, ModelCall
from dragoman.core.datatypes import BYTES, DATATYPES, NUMERIC, Datatype
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed
from dragoman.core.metrics import Family, Kind, Sample
from dragoman.core.scoring import Score, Scored
from dragoman.core.sequences import SequenceOptions
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import NONE, Tensor, object_array, with_own_dtype
from dragoman.core.text import Generation, Tokenized
from dragoman.core.text_engine_calls import ResetPrefixCache
from dragoman.system.call_times import CallTimes
from dragoman.system.load_steps import LoadStep
from dragoman.workers.pool import Loaded

_Size = Annotated[int, msgspec.Meta(ge=0)]
# Name, datatype, form of the data, shape, parameters, and the elements of a small BYTES tensor. The form is the dtype
# of an array, "" for that of `Datatype.wire_view`; or "text" or "bytes", as which the elements of BYTES were received.
# A large BYTES tensor has its raw encoding as an array.
Row = tuple[str, str, str, tuple[_Size, ...], Mapping[str, Any] | None, list[Any] | None]
# Name, datatype, shape, accepted datatypes, whether it is optional, content type, names of columns.
_SpecRow = tuple[str, str | None, tuple[int, ...] | None, list[str], bool, str, tuple[str, ...]]
# Inputs, outputs, open_inputs, open_outputs, batched, decodes, content_type, unchecked, outputs_are_hints.
_SignatureRow = tuple[list[_SpecRow], list[_SpecRow], bool, bool, bool, bool, str, bool, bool]
# Signature, platform, calls, streams, concurrent, merges, details, handlers, sequences, example, labels,
# kind, description.
_LoadedRow = tuple[
    _SignatureRow,
    str,
    list[str],
    bool,
    bool,
    int,
    dict[str, Any],
    tuple[str, ...],
    SequenceOptions | None,
    list[Row] | None,
    dict[str, tuple[str, ...]],
    str,
    str,
]

# Times of a traced call: seconds in the queue and of computing, batch, ages, nested calls with the same fields.
_Ages = tuple[
    float,
    float,
    tuple[str, int, int] | None,
    float | None,
    float | None,
    list[tuple[str, str, float | None, float | None, Any]],
]

_MetricName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*\Z")]
_LabelName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*\Z")]
# Name, kind, help, and the names, labels and values of the samples.
_FamilyRow = tuple[_MetricName, Kind, str, list[tuple[_MetricName, dict[_LabelName, str], float]]]

_DTYPES: Mapping[tuple[str, str], tuple[Datatype, np.dtype[Any]]] = {
    (d.name, dtype.str): (d, dtype) for d in NUMERIC for dtype in (d.dtype, d.dtype.newbyteorder())
} | {(d.name, ""): (d, d.dtype) for d in DATATYPES.values() if d.wire_view is not None}
_MODULES = {call.__module__ for call in (ModelCall, Score, ResetPrefixCache)}
_CALLS = {call.__name__: call for call in ModelCall.__subclasses__() if call.__module__ in _MODULES}
_CALLS |= {call.__name__: call for base in _CALLS.values() for call in base.__subclasses__()}
_ERRORS: Mapping[str, type[DragomanError]] = {
    name: error for name, error in vars(errors).items() if isinstance(error, type) and issubclass(error, DragomanError)
}
_BIG_INTEGER = 1  # extension type of integers of more than 64 bits
_MAX_INTEGER_DIGITS = 4096  # digits
_MAX_ELEMENTS = 256  # performance only: of BYTES that are sent as objects
_BYTES_FORMS = {"text": str, "bytes": bytes}


def _convert(value: Any) -> Any:
    """Return a value that MessagePack has, for NumPy's scalars, subclasses and mappings. Raises TypeError."""
    match value:
        case np.generic() | np.ndarray():
            return value.tolist()
        case Mapping():
            return dict(value)
        case str():
            return str.__str__(value)
        case int() | float():
            return value.__class__.__base__(value)  # type: ignore[misc]
    raise TypeError(f"cannot send an object of type '{type(value).__module__}.{type(value).__qualname__}'")


def _read_extension(code: int, data: memoryview) -> Any:
    if code != _BIG_INTEGER or len(data) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"unknown extension type {code}")
    return int(bytes(data))


_encoder = msgspec.msgpack.Encoder(enc_hook=_convert)


def serialize_message(value: object) -> list[Any]:
    """Return a value as bytes, followed by the memory of its arrays. Raises TypeError, OverflowError, UnicodeError."""
    arrays: list[Any] = []
    tag, form = next((_FORMS[base] for base in type(value).__mro__ if base in _FORMS), _UNKNOWN)
    fields = form.fields(value, arrays)
    try:
        head = _encoder.encode(fields)
    except OverflowError:
        head = _encoder.encode(_with_big_integers(fields))
    return [tag + head, *arrays]


def deserialize_message(parts: list[memoryview]) -> Any:
    """Return the value of `serialize_message`; its arrays are read-only views of the parts.

    Raises ValueError, TypeError, LookupError or StopIteration for anything else.
    """
    head = parts[0]
    if not 0 < head[0] <= len(_FORMS):
        raise ValueError(f"unknown type of message {head[0]}")
    form = _BY_TAG[head[0]]
    return form.value(form.decoder.decode(head[1:]), iter(parts[1:]))


# --- tensors ---------------------------------------------------------------------------------------------


def tensor_row(name: str, tensor: Tensor, arrays: list[Any]) -> Row:
    """Return a tensor without its arrays, which are appended. Raises TypeError for an element that is not bytes."""
    datatype = tensor.datatype
    if datatype is BYTES:
        form, elements = _bytes_form(tensor, arrays)
        return name, "BYTES", form, tensor.shape, tensor.parameters or None, elements
    data: Any = tensor.data
    if data.dtype is not datatype.dtype and (datatype.name, data.dtype.str) not in _DTYPES:
        data = with_own_dtype(tensor).data
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    form = data.dtype.str
    if datatype.wire_view is not None:  # its dtype has no such name and no buffer
        data, form = data.view(datatype.wire_view), ""
    arrays.append(pickle.PickleBuffer(data).raw())  # a view of its bytes, of any shape
    return name, datatype.name, form, data.shape, tensor.parameters or None, None


def _bytes_form(tensor: Tensor, arrays: list[Any]) -> tuple[str, list[Any] | None]:
    """Return the form of a BYTES tensor, and its elements if they are few objects; append its arrays otherwise."""
    is_text = came_as_text(tensor)
    is_raw = isinstance(tensor, BytesTensor) and tensor.is_raw
    if not is_raw and math.prod(tensor.shape) <= _MAX_ELEMENTS:
        return ("text", texts_of(tensor)) if is_text else ("bytes", tensor.data.reshape(-1).tolist())
    arrays.append(memoryview(raw_of(tensor)))
    return "text" if is_text else "bytes", None


def tensor_of_row(row: Row, arrays: Iterator[memoryview]) -> Tensor:
    """Return the tensor of a row. Raises ValueError if the elements of BYTES do not match the shape."""
    _, name, form, shape, parameters, elements = row
    if name != "BYTES":
        datatype, dtype = _DTYPES[name, form]
        return Tensor(np.ndarray(shape, dtype, next(arrays)), datatype, parameters or NONE)
    if form not in _BYTES_FORMS:
        raise ValueError(f"unknown form of BYTES elements {form!r}")
    if elements is None:
        try:
            return bytes_from_raw("BYTES", shape, next(arrays), parameters or NONE, form == "text")
        except InvalidInput as error:
            raise ValueError(str(error)) from None
    if any(type(element) is not _BYTES_FORMS[form] for element in elements):
        raise ValueError(f"expected {form} as elements of BYTES")
    if len(elements) != math.prod(shape):
        raise ValueError(f"expected {math.prod(shape)} BYTES elements, got {len(elements)}")
    if form == "text":
        return BytesTensor.of_texts(elements, shape, parameters or NONE)
    return Tensor(object_array(elements, shape), BYTES, parameters or NONE)


def _with_big_integers(value: Any) -> Any:
    """Return plain values with integers of more than 64 bits as extensions."""
    match value:
        case int() if not -(1 << 63) <= value < 1 << 64:
            return msgspec.msgpack.Ext(_BIG_INTEGER, str(value).encode())
        case Mapping():
            return {key: _with_big_integers(item) for key, item in value.items()}
        case list() | tuple():
            return [_with_big_integers(item) for item in value]
    return value


# --- descriptions ----------------------------------------------------------------------------------------


def _signature_row(signature: Signature) -> tuple[Any, ...]:
    sides = ([_spec_row(spec) for spec in side] for side in (signature.inputs, signature.outputs))
    flags = (signature.open_inputs, signature.open_outputs, signature.batched, signature.decodes)
    return (*sides, *flags, signature.content_type, signature.unchecked, signature.outputs_are_hints)


def _signature(row: tuple[Any, ...]) -> Signature:
    inputs, outputs, *rest = row
    return Signature(tuple(map(_spec, inputs)), tuple(map(_spec, outputs)), *rest)


def _spec_row(spec: TensorSpec) -> tuple[Any, ...]:
    datatype = None if spec.datatype is None else spec.datatype.name
    accepts = [accepted.name for accepted in spec.accepts]
    return spec.name, datatype, spec.shape, accepts, spec.optional, spec.content_type, spec.columns


def _spec(row: _SpecRow) -> TensorSpec:
    name, datatype, shape, accepts, optional, content_type, columns = row
    accepted = frozenset(DATATYPES[other] for other in accepts)
    known = None if datatype is None else DATATYPES[datatype]
    return TensorSpec(name, known, shape, accepted, optional, content_type, columns)


def _loaded_row(loaded: Loaded, arrays: list[Any]) -> tuple[Any, ...]:
    calls = [call.__name__ for call in loaded.calls]
    rest = (loaded.streams, loaded.concurrent, loaded.merges, loaded.details, loaded.handlers, loaded.sequences)
    example = None if loaded.example is None else [tensor_row(n, t, arrays) for n, t in loaded.example.items()]
    known = (example, loaded.labels, loaded.kind, loaded.description)
    return (_signature_row(loaded.signature), loaded.platform, calls, *rest, *known)


def _to_loaded(row: tuple[Any, ...], arrays: Iterator[memoryview]) -> Loaded:
    signature, platform, calls, *rest, rows, labels, kind, description = row
    example = None if rows is None else {fields[0]: tensor_of_row(fields, arrays) for fields in rows}
    known = [example, labels, kind, description]
    return Loaded(*[_signature(signature), platform, frozenset(_CALLS[call] for call in calls), *rest, *known])


class Measurements(NamedTuple):
    """The metrics of the model in a worker process."""

    families: tuple[Family, ...]


def _measurements_rows(value: Measurements, _arrays: list[Any]) -> list[_FamilyRow]:
    """Raises ValidationError for invalid names and labels."""
    rows = ((f, [(s.name, s.labels, float(s.value)) for s in f.flat]) for f in value.families)
    return msgspec.convert([(f.name, f.kind, f.help, samples) for f, samples in rows], list[_FamilyRow])


def _measurements(rows: list[_FamilyRow], _arrays: Iterator[memoryview]) -> Measurements:
    return Measurements(
        tuple(
            Family(name, kind, text, tuple(Sample(*sample) for sample in samples)) for name, kind, text, samples in rows
        )
    )


# --- the types of values -----------------------------------------------------------------------------------


class _Form(NamedTuple):
    """How values of a type are sent: `fields` returns plain values and appends arrays, `value` is its inverse."""

    decoder: "msgspec.msgpack.Decoder[Any]"
    fields: Callable[[Any, list[Any]], Any] = lambda value, _arrays: value
    value: Callable[[Any, Iterator[memoryview]], Any] = lambda fields, _arrays: fields


def _unsendable(value: object, _arrays: list[Any]) -> NoReturn:
    raise TypeError(f"a response of type {type(value).__name__} cannot be sent")


def _decoder(fields: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(fields, ext_hook=_read_extension)


def _inference_row(inference: Inference, arrays: list[Any]) -> tuple[Any, ...]:
    rows = [tensor_row(name, tensor, arrays) for name, tensor in inference.outputs.items()]
    return rows, inference.parameters or None, inference.metadata, inference.is_last


def _inference(fields: tuple[Any, ...], arrays: Iterator[memoryview]) -> Inference:
    rows, parameters, *rest = fields
    return Inference({row[0]: tensor_of_row(row, arrays) for row in rows}, parameters or NONE, *rest)


_TYPES: Mapping[type, _Form] = {
    Inference: _Form(
        _decoder(tuple[list[Row], dict[str, Any] | None, dict[str, str], bool]),
        _inference_row,
        _inference,
    ),
    Tensor: _Form(_decoder(Row), lambda tensor, arrays: tensor_row("", tensor, arrays), tensor_of_row),
    Embedded: _Form(
        _decoder(tuple[Row, int]),
        lambda value, arrays: (tensor_row("", value.vectors, arrays), value.tokens),
        lambda fields, arrays: Embedded(tensor_of_row(fields[0], arrays), fields[1]),
    ),
    Generation: _Form(_decoder(Generation)),
    Tokenized: _Form(_decoder(Tokenized)),
    Scored: _Form(_decoder(Scored)),
    Handled: _Form(_decoder(Handled)),
    Signature: _Form(
        _decoder(_SignatureRow),
        lambda value, _arrays: _signature_row(value),
        lambda fields, _arrays: _signature(fields),
    ),
    Loaded: _Form(_decoder(_LoadedRow), _loaded_row, _to_loaded),
    DragomanError: _Form(
        _decoder(tuple[str, str]),
        lambda error, _arrays: (type(error).__name__, error.message.encode(errors="backslashreplace").decode()),
        lambda fields, _arrays: _ERRORS.get(fields[0], ModelFailed)(fields[1]),
    ),
    tuple: _Form(_decoder(_Ages)),
    str: _Form(_decoder(str)),
    list: _Form(_decoder(list[int])),
    LoadStep: _Form(_decoder(LoadStep)),
    Measurements: _Form(_decoder(list[_FamilyRow]), _measurements_rows, _measurements),
    CallTimes: _Form(_decoder(CallTimes)),
}
_BY_TAG = [_Form(_decoder(None)), *_TYPES.values()]
# The first byte of a value is the number of its type. None is the first byte of a pickle, 0x80.
_FORMS: Mapping[type, tuple[bytes, _Form]] = {
    value_type: (bytes([tag]), form) for tag, (value_type, form) in enumerate(_TYPES.items(), 1)
}
_UNKNOWN = (b"", _Form(_decoder(None), _unsendable))
