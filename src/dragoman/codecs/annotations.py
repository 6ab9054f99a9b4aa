"""Conversions of type annotations: datatype and shape of the tensor, and how it becomes a Python value and back.

To add a type, add a line to `CONVERSIONS`.
"""

import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
import numpy as np
from msgspec.structs import replace

from dragoman.codecs.codec import CODECS, InputCodec
from dragoman.codecs.elements import strings
from dragoman.core.datatypes import (
    BOOL,
    BYTES,
    DATATYPES,
    FP64,
    INT64,
    NUMERIC,
    UINT8,
    Array,
    Datatype,
    datatype_of,
)
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.tensor import Tensor, object_array


class Conversion(msgspec.Struct, frozen=True):
    """How values of one annotation become tensors and back.

    datatype, shape, accepts, content_type: as in TensorSpec.
    to_value: `to_value(tensor, name)` returns the value of an input, or raises InvalidInput.
    to_tensor: `to_tensor(value)` returns the tensor of an output, or raises what NumPy or `Tensor.of` raise.
    kind: the type of a value, or with `many` of each element of a list; None if there is no single type.
    """

    datatype: Datatype | None
    shape: tuple[int, ...] | None
    accepts: frozenset[Datatype]
    to_value: Callable[[Tensor, str], Any]
    to_tensor: Callable[[Any], Tensor]
    content_type: str = ""
    kind: Any = None
    many: bool = False


def array_of(tensor: Tensor, name: str) -> Array:
    """Return the array of a tensor, unchanged."""
    return tensor.data


ANY = Conversion(None, None, frozenset(), array_of, Tensor.of)

# Content types of classes of which a codec decodes one per element; by name, because their packages are optional.
_CONTENT_TYPES: Mapping[str, str] = {
    "datetime.datetime": "datetime",
    "PIL.Image.Image": "pillow_image",
    "builtins.dict": "json",
}


def codec_conversion(codec: type[InputCodec]) -> Conversion:
    return Conversion(
        codec.datatype,
        None,
        frozenset(),
        lambda tensor, name: codec.to_value(tensor, f"input '{name}'"),
        codec.to_tensor,
        codec.content_type,
        codec.type_hint if isinstance(codec.type_hint, type) else None,
    )


def element_codec_conversion(element: Any) -> Conversion:
    """Return the conversion of a list of elements that have a codec; outputs have shape [N], as other lists."""
    content_type = _CONTENT_TYPES[full_name(get_origin(element) or element)]
    codec = CODECS.input(content_type)

    def to_tensor(value: Any) -> Tensor:
        tensor = codec.to_tensor(list(value))
        return Tensor(tensor.data.reshape(-1), tensor.datatype, tensor.parameters)

    def to_value(tensor: Tensor, name: str) -> Any:
        values = codec.to_value(tensor, f"input '{name}'")
        others = [v for v in values if not isinstance(v, dict)] if content_type == "json" else []
        if others:
            raise InvalidInput(f"input '{name}': expected JSON objects, got {type(others[0]).__name__}")
        return values

    are_images = content_type == "pillow_image"  # which may also be arrays of pixels, with several axes
    return replace(
        codec_conversion(codec),
        shape=None if are_images else (-1,),
        accepts=frozenset({UINT8}) if are_images else frozenset(),
        datatype=BYTES,
        to_value=to_value,
        to_tensor=to_tensor,
        kind=get_origin(element) or element,
        many=True,
    )


def series_conversion() -> Conversion:
    """Return the conversion of a `pd.Series`, whose datatype depends on the value."""
    from dragoman.codecs.pandas import decode_series, encode_series  # it needs pandas

    return replace(
        ANY, to_value=lambda tensor, name: decode_series(tensor, f"input '{name}'"), to_tensor=encode_series, kind=None
    )


def has_element_codec(element: Any) -> bool:
    """Return whether an annotation is a class of which a codec decodes one per element."""
    return bool(element == dict[str, Any]) or full_name(element) in _CONTENT_TYPES


def full_name(annotation: Any) -> str:
    """Return the module and name of a class; "" for any other annotation."""
    if not isinstance(annotation, type):
        return ""
    return f"{annotation.__module__}.{annotation.__qualname__}"


_FLOATS = frozenset(d for d in DATATYPES.values() if d.kind == "float")
_INTEGERS = frozenset(d for d in NUMERIC if d.kind in ("int", "uint"))
_EXACT_IN_FP64 = 2**53


class Shape(tuple[int, ...]):
    """A tensor's shape in an annotation: `Annotated[NDArray[np.float32], Shape(-1, 4)]`; -1 is an axis of any size."""

    __slots__ = ()

    def __new__(cls, *axes: int) -> "Shape":
        return super().__new__(cls, axes)

    def __getnewargs__(self) -> tuple[int, ...]:
        return tuple(self)


def conversion_of(annotation: Any, where: str) -> Conversion:
    """Return the conversion of an annotation. Raises ModelFailed naming `where` it is if it is not supported."""
    custom = CODECS.custom_input_for_hint(annotation)
    if custom is not None:
        return codec_conversion(custom)
    for known, conversion in CONVERSIONS.items():
        if known is annotation:  # not every annotation can be hashed
            return conversion
    if has_element_codec(annotation):
        return _single(element_codec_conversion(annotation))
    if full_name(annotation) in ("pandas.Series", "pandas.core.series.Series"):  # the latter before pandas 3
        return series_conversion()
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        codec = next((note for note in arguments[1:] if isinstance(note, type) and issubclass(note, InputCodec)), None)
        return codec_conversion(codec) if codec else _with_notes(conversion_of(arguments[0], where), arguments[1:])
    if origin is np.ndarray:
        return _array(_scalar_type(arguments), annotation, where)
    if origin is list and arguments:
        return _list(annotation, where)
    if isinstance(annotation, type) and issubclass(annotation, np.generic):
        return _single(_array(annotation, annotation, where))
    raise ModelFailed(
        f"{where}: unsupported annotation {_name_of(annotation)}: expected np.ndarray, "
        "NDArray[np.float32], Annotated[NDArray[...], Shape(-1, 4)], float, int, bool, str, bytes, datetime, dict, "
        "PIL.Image.Image or a list of these, pd.Series or pd.DataFrame"
    )


def optional(annotation: Any) -> tuple[Any, bool]:
    """Return the annotation without `| None`, and whether it had it."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    others = tuple(a for a in get_args(annotation) if a is not type(None))
    if len(others) == 1 and len(others) < len(get_args(annotation)):
        return others[0], True
    return annotation, False


# --- arrays ----------------------------------------------------------------------------------------------


def _scalar_type(arguments: tuple[Any, ...]) -> Any:
    """Return the scalar type in the arguments of `np.ndarray[shape, np.dtype[scalar]]`."""
    scalar = (*(get_args(arguments[1]) if len(arguments) > 1 else ()), Any)[0]
    if isinstance(scalar, TypeVar):  # `NDArray` without arguments
        return scalar.__bound__ or Any
    return scalar


def _array(scalar: Any, annotation: Any, where: str) -> Conversion:
    """Return the conversion of an NDArray of a scalar type, of an abstract one such as np.floating, or of Any."""
    if scalar is Any or scalar is np.generic:
        return ANY
    if scalar is np.str_:
        return Conversion(BYTES, None, frozenset(), strings, Tensor.of)
    scalar = get_origin(scalar) or scalar  # np.floating[Any]
    try:
        matching = [d for d in DATATYPES.values() if issubclass(d.dtype.type, scalar)]
        if len(matching) > 1:
            first = next((d for d in (FP64, INT64) if d in matching), matching[0])
            return Conversion(first, None, frozenset(matching) - {first}, array_of, Tensor.of)
        return _array_of_datatype(datatype_of(np.dtype(scalar)))
    except (InvalidInput, TypeError) as error:
        text = f"{where}: unsupported annotation {_name_of(annotation)}: the protocol has no datatype for it"
        raise ModelFailed(text) from error


def _array_of_datatype(datatype: Datatype) -> Conversion:
    return Conversion(datatype, None, frozenset(), array_of, lambda value: Tensor.of(value, datatype))


def _with_notes(plain: Conversion, notes: tuple[Any, ...]) -> Conversion:
    """Return the conversion with the shape and datatype that the arguments of `Annotated` give."""
    for note in notes:
        match note:
            case Shape():
                plain = replace(plain, shape=tuple(note))
            case Datatype():
                plain = replace(_array_of_datatype(note), shape=plain.shape)
    return plain


# --- single values and lists of them ---------------------------------------------------------------------


def _to_lists(datatype: Datatype, *, text: bool = False) -> Callable[[Tensor, str], Any]:
    """Return a function that returns the elements of a tensor as Python values in nested lists, without rounding."""

    def to_value(tensor: Tensor, name: str) -> Any:
        if text:
            return strings(tensor, name).tolist()
        array = tensor.data
        if tensor.datatype in _INTEGERS and datatype is FP64:
            if array.size and max(abs(int(array.max())), abs(int(array.min()))) > _EXACT_IN_FP64:
                raise InvalidInput(f"input '{name}': expected numbers that FP64 can hold, got an integer beyond 2**53")
            array = array.astype(np.float64)
        return array.tolist()

    return to_value


def _from_lists(datatype: Datatype) -> Callable[[Any], Tensor]:
    def to_tensor(value: Any) -> Tensor:
        if datatype is BYTES:
            # NumPy's string dtypes drop trailing zero bytes.
            value = object_array(value, (len(value),)) if not len(value) or not isinstance(value[0], list) else value
            return Tensor.of(np.asarray(value, dtype=object))
        return Tensor.of(np.asarray(value) if len(value) else np.zeros(0, datatype.dtype), datatype)

    return to_tensor


def _list(annotation: Any, where: str) -> Conversion:
    """Return the conversion of `list[float]`, `list[list[int]]`, ...: one axis of any size per list."""
    depth, element = 0, annotation
    while get_origin(element) is list and get_args(element):
        depth, element = depth + 1, get_args(element)[0]
    if depth == 1 and has_element_codec(element):
        return element_codec_conversion(element)
    conversion = _ELEMENTS.get(element) if isinstance(element, type) else None
    if conversion is None:
        raise ModelFailed(
            f"{where}: unsupported annotation {_name_of(annotation)}: expected a list of float, int, bool, str, bytes, "
            "datetime, dict or images"
        )
    return replace(conversion, shape=(-1,) * depth, many=depth == 1)


def _single(many: Conversion) -> Conversion:
    """Return the conversion of one value instead of a list: shape [1]; inputs may have one element in any shape."""
    is_image = many.shape is None and bool(many.content_type)  # one value may be an array of several axes

    def to_value(tensor: Tensor, name: str) -> Any:
        if not is_image and tensor.data.size != 1:
            raise InvalidInput(f"input '{name}': expected one value, got shape {list(tensor.data.shape)}")
        values = many.to_value(tensor if is_image else _flat(tensor), name)
        if len(values) != 1:
            raise InvalidInput(f"input '{name}': expected one value, got {len(values)}")
        return values[0]

    return replace(
        many,
        shape=None if is_image else (1,),
        to_value=to_value,
        to_tensor=lambda value: many.to_tensor([value]),
        many=False,
    )


def _flat(tensor: Tensor) -> Tensor:
    return Tensor(tensor.data.reshape(1), tensor.datatype, tensor.parameters)


def _name_of(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)


_ELEMENTS: Mapping[Any, Conversion] = {
    float: Conversion(FP64, (-1,), _FLOATS | _INTEGERS, _to_lists(FP64), _from_lists(FP64), kind=float),
    int: Conversion(INT64, (-1,), _INTEGERS, _to_lists(INT64), _from_lists(INT64), kind=int),
    bool: Conversion(BOOL, (-1,), frozenset(), _to_lists(BOOL), _from_lists(BOOL), kind=bool),
    str: Conversion(BYTES, (-1,), frozenset(), _to_lists(BYTES, text=True), _from_lists(BYTES), kind=str),
    bytes: Conversion(BYTES, (-1,), frozenset(), _to_lists(BYTES), _from_lists(BYTES), kind=bytes),
}
CONVERSIONS: Mapping[Any, Conversion] = {
    Any: replace(ANY, kind=object),
    np.ndarray: replace(ANY, kind=np.ndarray),
    Tensor: replace(ANY, to_value=lambda tensor, name: tensor),
    **{kind: _single(many) for kind, many in _ELEMENTS.items()},
}
