"""Dragoman's codecs with the interface of MLServer's codecs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar

import numpy as np

from dragoman.codecs.codec import CODECS
from dragoman.codecs.elements import content_error
from dragoman.core.bytes_tensor import came_as_text, texts_of, with_parameters
from dragoman.core.datatypes import BYTES, datatype, datatype_of
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.tensor import Tensor, object_array
from dragoman_mlserver.mlserver.codecs.base import (
    InputCodec,
    RequestCodec,
    SingleInputRequestCodec,
    register_input_codec,
    register_request_codec,
)
from dragoman_mlserver.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RequestInput,
    ResponseOutput,
)
from dragoman_mlserver.mlserver.types.data import elements, has_null

_FIXED_WIDTH_MAX = 1 << 18  # characters that elements of a fixed width may take whatever their content


class AdaptedInputCodec(InputCodec):
    """Dragoman's codec of the content type, for one tensor. A class derived from it may have another content type."""

    _adapted_type: ClassVar[str] = ""
    _allows_null: ClassVar[bool] = False  # among the elements of BYTES

    def __init_subclass__(cls) -> None:
        if AdaptedInputCodec in cls.__bases__:
            cls._adapted_type = cls.ContentType

    @classmethod
    def _codec(cls) -> Any:
        return CODECS.input(cls._adapted_type)

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return bool(cls._codec().can_encode(payload))

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        with _invalid_output(f"output '{name}'"):
            return ResponseOutput.from_tensor(name, cls._to_tensor(payload, **kwargs))

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> Any:
        return cls._decode(response_output.to_tensor(), f"output '{response_output.name}'")

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return RequestInput.from_tensor(name, cls._to_tensor(payload, **kwargs))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        return cls._decode(request_input.to_tensor(), f"input '{request_input.name}'")

    @classmethod
    def _decode(cls, tensor: Tensor, where: str) -> Any:
        if not cls._allows_null:
            _reject_null(tensor, where, cls.ContentType or cls._adapted_type)
        return _writable(cls._to_value(tensor, where))

    @classmethod
    def _to_tensor(cls, payload: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = cls._codec().to_tensor(payload, **kwargs)
        return tensor

    @classmethod
    def _to_value(cls, tensor: Tensor, where: str) -> Any:
        return cls._codec().to_value(tensor, where)


class AdaptedRequestCodec(RequestCodec):
    """Dragoman's codec of the content type, for a whole request."""

    @classmethod
    def _codec(cls) -> Any:
        codec = CODECS.request(cls.ContentType)
        assert codec is not None
        return codec

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return bool(cls._codec().can_encode(payload))

    @classmethod
    def encode_response(
        cls,
        model_name: str,
        payload: Any,
        model_version: str | None = None,
        use_bytes: bool = True,
        **kwargs: Any,
    ) -> InferenceResponse:
        return InferenceResponse(
            model_name=model_name,
            model_version=model_version,
            parameters=Parameters(content_type=cls.ContentType),
            outputs=cls.encode_outputs(payload, use_bytes, **kwargs),
        )

    @classmethod
    def encode_outputs(cls, payload: Any, use_bytes: bool = True, **kwargs: Any) -> list[ResponseOutput]:
        with _invalid_output("the response"):
            tensors = cls._to_tensors(payload, "output", **kwargs)
        return [ResponseOutput.from_tensor(name, tensor) for name, tensor in tensors.items()]

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        return cls._codec().to_value({o.name: o.to_tensor() for o in response.outputs}, "output")

    @classmethod
    def encode_request(cls, payload: Any, use_bytes: bool = True, **kwargs: Any) -> InferenceRequest:
        tensors = cls._to_tensors(payload, "input", **kwargs)
        return InferenceRequest(
            parameters=Parameters(content_type=cls.ContentType),
            inputs=[RequestInput.from_tensor(name, tensor) for name, tensor in tensors.items()],
        )

    @classmethod
    def _to_tensors(cls, payload: Any, noun: str, **kwargs: Any) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = cls._codec().to_tensors(payload, noun, **kwargs)
        return tensors

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        tensors = {i.name: _as_column(i) for i in request.inputs}
        missing: dict[str, list[bool]] = {}
        for name, tensor in tensors.items():
            if has_null(tensor):
                if (content_type := _type_of_elements(tensor)) != "str":
                    _reject_null(tensor, f"input '{name}'", content_type)
                missing[name] = [each is None for each in tensor.data.flat]
                filled = object_array([b"" if each is None else each for each in tensor.data.flat], tensor.shape)
                tensors[name] = Tensor(filled, BYTES, tensor.parameters)
        value = _writable(cls._codec().to_value(tensors, "input"))
        for name, is_missing in missing.items():
            cells = [None if gone else each for each, gone in zip(value[name], is_missing, strict=True)]
            value[name] = type(value[name])(cells, dtype=value[name].dtype)
        return value


def _type_of_elements(tensor: Tensor) -> str:
    """Return the content type of a column: `str` if its elements are text as they are."""
    if "pandas_dtype" in tensor.parameters:
        return f"pd of dtype {tensor.parameters['pandas_dtype']}"
    return str(tensor.parameters.get("content_type") or "str")


def _reject_null(tensor: Tensor, where: str, content_type: str) -> None:
    """Raise InvalidInput if an element of BYTES is null."""
    if has_null(tensor):
        at = tensor.data.reshape(-1).tolist().index(None)
        raise content_error(where, content_type, f"expected no null, got one at element {at}")


def _as_column(request_input: RequestInput) -> Tensor:
    """Return the tensor with the content type of the model's metadata if the request gives none.

    Elements of BYTES with the content type of arrays are text, as without one.
    """
    tensor, own = request_input.to_tensor(), getattr(request_input, "_content_type", None)
    content_type = tensor.parameters.get("content_type", own)
    if tensor.datatype is BYTES and content_type == NumpyCodec.ContentType and "numpy_dtype" not in tensor.parameters:
        content_type = None
    if content_type == tensor.parameters.get("content_type"):
        return tensor
    rest = {name: value for name, value in tensor.parameters.items() if name != "content_type"}
    return with_parameters(tensor, rest if content_type is None else {**rest, "content_type": content_type})


def _writable(value: Any) -> Any:
    """Return a copy of a read-only array, because custom models may write to decoded values."""
    return value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value


@contextmanager
def _invalid_output(where: str) -> Iterator[None]:
    """Raise InvalidOutput for a result that cannot be encoded: it is an error of the model, not of the client."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidOutput(f"{where}: {error.message}") from error


@register_input_codec
class StringCodec(AdaptedInputCodec):
    """Lists of UTF-8 text."""

    ContentType = "str"
    TypeHint = list[str]
    _allows_null = True

    @classmethod
    def _to_value(cls, tensor: Tensor, where: str) -> Any:
        return elements(tensor) if has_null(tensor) else super()._to_value(tensor, where)


@register_request_codec
class StringRequestCodec(SingleInputRequestCodec):
    """A request of one list of text."""

    ContentType = "str"
    TypeHint = list[str]
    InputCodec = StringCodec


def encode_str(elem: str) -> bytes:
    return elem.encode()


def decode_str(encoded: bytes | str, str_codec: str = "utf-8") -> str:
    """Return bytes as text, and text unchanged."""
    return encoded.decode(str_codec) if isinstance(encoded, bytes) else str(encoded)


@register_input_codec
class Base64Codec(AdaptedInputCodec):
    """Lists of bytes or ASCII text, sent as base64."""

    ContentType = "base64"
    TypeHint = list[bytes]

    @classmethod
    def _to_tensor(cls, payload: Any, **kwargs: Any) -> Tensor:
        if isinstance(payload, list):
            payload = [each.encode() if isinstance(each, str) else each for each in payload]
        return super()._to_tensor(payload, **kwargs)


@register_input_codec
class DatetimeCodec(AdaptedInputCodec):
    """Lists of datetimes, or of ISO 8601 text."""

    ContentType = "datetime"
    TypeHint = list[datetime]

    @classmethod
    def _to_tensor(cls, payload: Any, **kwargs: Any) -> Tensor:
        return super()._to_tensor(_parse(payload), **kwargs)


def _parse(payload: Any) -> Any:
    if isinstance(payload, str):
        return datetime.fromisoformat(payload)
    if isinstance(payload, list):
        return [datetime.fromisoformat(each) if isinstance(each, str) else each for each in payload]
    return payload


@register_input_codec
class NumpyCodec(AdaptedInputCodec):
    """Arrays; [N] is encoded as [N, 1], a scalar as [1]. BYTES that were sent as text are decoded as an array of
    `str`, others as an object array of `bytes`."""

    ContentType = "np"
    TypeHint = np.ndarray
    _allows_null = True

    @classmethod
    def _to_tensor(cls, payload: Any, **kwargs: Any) -> Tensor:
        tensor = super()._to_tensor(payload, **kwargs)
        if not tensor.data.ndim:
            tensor = Tensor(tensor.data.reshape(1), tensor.datatype, tensor.parameters)
        return _without(tensor, "numpy_")

    @classmethod
    def _to_value(cls, tensor: Tensor, where: str) -> Any:
        if tensor.datatype is not BYTES or not came_as_text(tensor) or "numpy_dtype" in tensor.parameters:
            return super()._to_value(tensor, where)
        texts = texts_of(tensor)
        longest = max(map(len, texts), default=0)
        if any(text.endswith("\0") for text in texts) or longest * len(texts) > _FIXED_WIDTH_MAX + 4 * sum(
            map(len, texts)
        ):
            return object_array(texts, tensor.shape)  # a fixed-width array would lose trailing NULs, or be huge
        return np.array(texts, dtype=np.str_).reshape(tensor.shape)


@register_request_codec
class NumpyRequestCodec(SingleInputRequestCodec):
    """A request of one array."""

    ContentType = "np"
    TypeHint = np.ndarray
    InputCodec = NumpyCodec


def to_datatype(dtype: Any) -> str:
    return datatype_of(np.dtype(dtype)).name


def to_dtype(input_or_output: Any) -> np.dtype[Any]:
    return datatype(input_or_output.datatype).dtype


class _DataFrame:
    """The class pd.DataFrame if pandas has been imported: importing it only for this would take time."""

    def __get__(self, _instance: object, _owner: type | None = None) -> Any:
        return getattr(sys.modules.get("pandas"), "DataFrame", type(None))


@register_request_codec
class PandasCodec(AdaptedRequestCodec):
    """Data frames, one input or output per column."""

    ContentType = "pd"
    JsonContentType = "pd_json"
    TypeHint = _DataFrame()

    @classmethod
    def _to_tensors(cls, payload: Any, noun: str, **kwargs: Any) -> dict[str, Tensor]:
        frame = payload
        for at in range(payload.shape[1] if cls.can_encode(payload) else 0):
            column = payload.iloc[:, at]
            if column.dtype == object and any(
                isinstance(each, np.ndarray | np.generic | list | dict) for each in column
            ):
                frame = frame.copy() if frame is payload else frame
                frame.isetitem(at, column.map(_without_arrays).astype(object))
        return super()._to_tensors(frame, noun, **kwargs)


def _without_arrays(value: Any) -> Any:
    """Return a cell with lists and numbers of Python for those of NumPy."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _without_arrays(each) for name, each in value.items()}
    return [_without_arrays(each) for each in value] if isinstance(value, list | tuple) else value


def _without(tensor: Tensor, prefix: str) -> Tensor:
    """Return the tensor without the parameters that MLServer does not have."""
    own = {name: value for name, value in tensor.parameters.items() if not name.startswith(prefix)}
    return tensor if len(own) == len(tensor.parameters) else with_parameters(tensor, own)
