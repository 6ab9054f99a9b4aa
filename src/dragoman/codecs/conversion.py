"""Conversion between the Python values of a type annotation and tensors, directly or by a codec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_origin

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.registry import CODECS
from dragoman.core.datatypes import BYTES, UINT8, Array, Datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Conversion:
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
    """Return the conversion of all values of a codec."""
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
