"""Dragoman's codecs with the interface of MLServer's codecs."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import numpy as np

from dragoman.codecs.codec import CODECS
from dragoman.compat.mlserver.codecs.base import InputCodec, RequestCodec, register_input_codec, register_request_codec
from dragoman.compat.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RequestInput,
    ResponseOutput,
)
from dragoman.core.datatypes import datatype, datatype_of
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.tensor import Tensor


class AdaptedInputCodec(InputCodec):
    """Dragoman's codec of the content type, for one tensor."""

    @classmethod
    def _codec(cls) -> Any:
        return CODECS.input(cls.ContentType)

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return bool(cls._codec().can_encode(payload))

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        with _invalid_output(f"output '{name}'"):
            return ResponseOutput.from_tensor(name, cls._codec().to_tensor(payload, **kwargs))

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> Any:
        tensor = response_output.to_tensor()
        return _writable(cls._codec().to_value(tensor, f"output '{response_output.name}'"))

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return RequestInput.from_tensor(name, cls._codec().to_tensor(payload, **kwargs))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        return _writable(cls._codec().to_value(request_input.to_tensor(), f"input '{request_input.name}'"))


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
            tensors: Mapping[str, Tensor] = cls._codec().to_tensors(payload, "output", **kwargs)
        return [ResponseOutput.from_tensor(name, tensor) for name, tensor in tensors.items()]

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        return cls._codec().to_value({o.name: o.to_tensor() for o in response.outputs}, "output")

    @classmethod
    def encode_request(cls, payload: Any, use_bytes: bool = True, **kwargs: Any) -> InferenceRequest:
        tensors: Mapping[str, Tensor] = cls._codec().to_tensors(payload, "input", **kwargs)
        return InferenceRequest(
            parameters=Parameters(content_type=cls.ContentType),
            inputs=[RequestInput.from_tensor(name, tensor) for name, tensor in tensors.items()],
        )

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        tensors = {i.name: _with_content_type(i) for i in request.inputs}
        return _writable(cls._codec().to_value(tensors, "input"))


def _with_content_type(request_input: RequestInput) -> Tensor:
    """Return the tensor with the content type of the model's metadata if the request gives none."""
    tensor, content_type = request_input.to_tensor(), getattr(request_input, "_content_type", None)
    if content_type is None or "content_type" in tensor.parameters:
        return tensor
    return Tensor(tensor.data, tensor.datatype, {**tensor.parameters, "content_type": content_type})


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


@register_request_codec
class StringRequestCodec(AdaptedRequestCodec):
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
    """Lists of bytes, sent as base64."""

    ContentType = "base64"
    TypeHint = list[bytes]


@register_input_codec
class DatetimeCodec(AdaptedInputCodec):
    """Lists of datetimes, or of ISO 8601 text."""

    ContentType = "datetime"
    TypeHint = list[datetime]

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        return super().encode_output(name, _parse(payload), **kwargs)

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return super().encode_input(name, _parse(payload), **kwargs)


def _parse(payload: Any) -> Any:
    if isinstance(payload, str):
        return datetime.fromisoformat(payload)
    if isinstance(payload, list):
        return [datetime.fromisoformat(each) if isinstance(each, str) else each for each in payload]
    return payload


@register_input_codec
class NumpyCodec(AdaptedInputCodec):
    """Arrays; [N] is encoded as [N, 1]."""

    ContentType = "np"
    TypeHint = np.ndarray


@register_request_codec
class NumpyRequestCodec(AdaptedRequestCodec):
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
