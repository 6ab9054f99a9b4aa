"""Base classes of codecs. A codec converts the Python values of one content type to tensors and back.

A custom codec defines `content_type`, `can_encode`, `to_tensor` and `to_value`; all other methods use these. Codecs
have no state, so all methods are class methods. Encoding methods accept the option `use_bytes` of MLServer and ignore
it: BYTES elements are always bytes here, and become text where a request is written as JSON.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from dragoman.core.datatypes import Datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Parameters, Tensor
from dragoman.formats.message import InferenceRequest, InferenceResponse, RequestInput, ResponseOutput


class InputCodec:
    """Codec of values that are one tensor.

    type_hint: the annotation that selects this content type.
    datatype: the datatype of every tensor of this content type, for metadata; None if it depends on the value.
    """

    content_type: ClassVar[str]
    type_hint: ClassVar[Any] = None
    datatype: ClassVar[Datatype | None] = None

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        """Return whether this codec encodes the value when no content type is requested."""
        return False

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        """Return the value as a tensor with the content type in its parameters. Raises InvalidInput."""
        raise NotImplementedError

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        """Return the value of a tensor. Raises InvalidInput naming `where` (`input 'x'`) and the first bad element."""
        raise NotImplementedError

    # --- called by clients and models ------------------------------------------------------------------------

    @classmethod
    def encode_input(cls, name: str, payload: Any, **options: Any) -> RequestInput:
        return RequestInput(name, cls.to_tensor(payload, **options))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        return cls.to_value(request_input.tensor, f"input '{request_input.name}'")

    @classmethod
    def encode_output(cls, name: str, payload: Any, **options: Any) -> ResponseOutput:
        return ResponseOutput(name, cls.to_tensor(payload, **options))

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> Any:
        return cls.to_value(response_output.tensor, f"output '{response_output.name}'")


class RequestCodec:
    """Codec of values that are all tensors of a request or response. `type_hint` is the annotation that selects it."""

    content_type: ClassVar[str]
    type_hint: ClassVar[Any] = None

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        """Return whether this codec encodes the value when no content type is requested."""
        return False

    @classmethod
    def to_tensors(cls, value: Any, noun: str = "input", **options: Any) -> dict[str, Tensor]:
        """Return the value as named tensors; `noun`, "input" or "output", is used in names and errors."""
        raise NotImplementedError

    @classmethod
    def to_value(cls, tensors: Mapping[str, Tensor], noun: str = "input") -> Any:
        """Return the value of named tensors, in order. Raises InvalidInput naming the tensor and the bad element."""
        raise NotImplementedError

    # --- called by clients and models ------------------------------------------------------------------------

    @classmethod
    def parameters(cls) -> Parameters:
        return {"content_type": cls.content_type}

    @classmethod
    def encode_request(cls, payload: Any, **options: Any) -> InferenceRequest:
        inputs = [RequestInput(name, tensor) for name, tensor in cls.to_tensors(payload, "input", **options).items()]
        return InferenceRequest(inputs=inputs, parameters=cls.parameters())

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        return cls.to_value(request.tensors, "input")

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **options: Any
    ) -> InferenceResponse:
        tensors = cls.to_tensors(payload, "output", **options)
        return InferenceResponse.of(
            tensors, model_name=model_name, model_version=model_version or "", parameters=cls.parameters()
        )

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        return cls.to_value(response.tensors, "output")


class FirstTensorCodec(RequestCodec):
    """A request or response of one tensor, converted by `codec`. Further tensors are ignored."""

    codec: ClassVar[type[InputCodec]]

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return cls.codec.can_encode(value)

    @classmethod
    def to_tensors(cls, value: Any, noun: str = "input", **options: Any) -> dict[str, Tensor]:
        return {f"{noun}-1": cls.codec.to_tensor(value, **options)}

    @classmethod
    def to_value(cls, tensors: Mapping[str, Tensor], noun: str = "input") -> Any:
        for name, tensor in tensors.items():
            return cls.codec.to_value(tensor, f"{noun} '{name}'")
        raise InvalidInput(f"content type '{cls.content_type}': expected one {noun}, got none")
