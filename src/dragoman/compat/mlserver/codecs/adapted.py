"""Our codecs behind the interface that custom models know."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from dragoman.codecs.registry import CODECS
from dragoman.compat.mlserver.codecs.base import InputCodec, RequestCodec
from dragoman.compat.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RequestInput,
    ResponseOutput,
)
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.tensor import Tensor


class AdaptedInput(InputCodec):
    """The codec of the content type, for one tensor."""

    @classmethod
    def _ours(cls) -> Any:
        return CODECS.input(cls.ContentType)

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return bool(cls._ours().can_encode(payload))

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        with _our_fault(f"output '{name}'"):
            return ResponseOutput.from_tensor(name, cls._ours().to_tensor(payload, **kwargs))

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> Any:
        tensor = response_output.to_tensor()
        return _writable(cls._ours().to_value(tensor, f"output '{response_output.name}'"))

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return RequestInput.from_tensor(name, cls._ours().to_tensor(payload, **kwargs))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        return _writable(cls._ours().to_value(request_input.to_tensor(), f"input '{request_input.name}'"))


class AdaptedRequest(RequestCodec):
    """The codec of the content type, for a whole request."""

    @classmethod
    def _ours(cls) -> Any:
        found = CODECS.request(cls.ContentType)
        assert found is not None
        return found

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return bool(cls._ours().can_encode(payload))

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
        with _our_fault("the answer"):
            tensors: Mapping[str, Tensor] = cls._ours().to_tensors(payload, "output", **kwargs)
        return [ResponseOutput.from_tensor(name, tensor) for name, tensor in tensors.items()]

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        return cls._ours().to_value({o.name: o.to_tensor() for o in response.outputs}, "output")

    @classmethod
    def encode_request(cls, payload: Any, use_bytes: bool = True, **kwargs: Any) -> InferenceRequest:
        tensors: Mapping[str, Tensor] = cls._ours().to_tensors(payload, "input", **kwargs)
        return InferenceRequest(
            parameters=Parameters(content_type=cls.ContentType),
            inputs=[RequestInput.from_tensor(name, tensor) for name, tensor in tensors.items()],
        )

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        tensors = {i.name: _typed(i) for i in request.inputs}
        return _writable(cls._ours().to_value(tensors, "input"))


def _typed(request_input: RequestInput) -> Tensor:
    """The tensor, with the content type that the model's metadata gives it where the request gives none."""
    tensor, told = request_input.to_tensor(), getattr(request_input, "_content_type", None)
    if told is None or "content_type" in tensor.parameters:
        return tensor
    return Tensor(tensor.data, tensor.datatype, {**tensor.parameters, "content_type": told})


def _writable(value: Any) -> Any:
    """Custom models may change in place what they decode, which is a view of what came."""
    return value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value


@contextmanager
def _our_fault(where: str) -> Iterator[None]:
    """A result that cannot be encoded is no fault of the caller."""
    try:
        yield
    except InvalidInput as fault:
        raise InvalidOutput(f"{where}: {fault.message}") from fault
