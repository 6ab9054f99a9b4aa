"""Annotations that a codec speaks for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_origin

from dragoman import plugins
from dragoman.codecs.codec import InputCodec
from dragoman.codecs.conversion import ANY, Conversion
from dragoman.codecs.registry import CODECS
from dragoman.core.datatypes import BYTES, UINT8
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor

# Annotations of which a codec makes one element; by name, since their packages need not be installed.
_BY_CODEC: Mapping[str, str] = {
    "datetime.datetime": "datetime",
    "PIL.Image.Image": "pillow_image",
    "builtins.dict": "json",
}


def of_codec(codec: type[InputCodec]) -> Conversion:
    """What a codec takes and gives, whole."""
    return Conversion(
        codec.datatype,
        None,
        frozenset(),
        lambda tensor, name: codec.to_value(tensor, f"input '{name}'"),
        codec.to_tensor,
        codec.content_type,
        codec.type_hint if isinstance(codec.type_hint, type) else None,
    )


def by_codec(element: Any) -> Conversion:
    """A list of elements that a codec makes; what goes out is told as shape [N], as for any other list."""
    content_type = _BY_CODEC[full_name(get_origin(element) or element)]
    codec = CODECS.input(content_type)

    def to_tensor(value: Any) -> Tensor:
        tensor = codec.to_tensor(list(value))
        return replace(tensor, data=tensor.data.reshape(-1))

    def to_value(tensor: Tensor, name: str) -> Any:
        values = codec.to_value(tensor, f"input '{name}'")
        strange = [v for v in values if not isinstance(v, dict)] if content_type == "json" else []
        if strange:
            raise InvalidInput(f"input '{name}': expected JSON objects, got {type(strange[0]).__name__}")
        return values

    images = content_type == "pillow_image"  # which may be arrays of pixels as well, of several axes
    return replace(
        of_codec(codec),
        shape=None if images else (-1,),
        accepts=frozenset({UINT8}) if images else frozenset(),
        datatype=BYTES,
        to_value=to_value,
        to_tensor=to_tensor,
        kind=get_origin(element) or element,
        many=True,
    )


def series() -> Conversion:
    """A column of a data frame. Its datatype is not known before there is one."""
    read: Any = plugins.resolve("dragoman.codecs.pandas:series_value")
    write: Any = plugins.resolve("dragoman.codecs.pandas:series_tensor")
    return replace(ANY, to_value=lambda tensor, name: read(tensor, f"input '{name}'"), to_tensor=write, kind=None)


def has_codec(element: Any) -> bool:
    """Whether an annotation is one of which a codec makes one element."""
    return bool(element == dict[str, Any]) or full_name(element) in _BY_CODEC


def full_name(annotation: Any) -> str:
    """Where a class comes from, for those of packages that need not be installed."""
    if not isinstance(annotation, type):
        return ""
    return f"{annotation.__module__}.{annotation.__qualname__}"
