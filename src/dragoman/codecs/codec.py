"""What a codec is: a content type, and how its Python values become tensors and come back.

A content type of one's own is a class with `content_type`, `can_encode`, `to_tensor` and `to_value`; everything else
follows from them. All methods are class methods: a codec holds no state. Every method that encodes takes
`use_bytes`, which code written for other servers passes: here it changes nothing, since the elements of BYTES are
always bytes, and whoever writes JSON makes text of them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from dragoman.core.datatypes import Datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Parameters, Tensor
from dragoman.formats.message import InferenceRequest, InferenceResponse, RequestInput, ResponseOutput


class InputCodec:
    """Values that fit into one tensor.

    `type_hint`: the annotation that means this content type. `datatype`, where it is always the same, tells metadata.
    """

    content_type: ClassVar[str]
    type_hint: ClassVar[Any] = None
    datatype: ClassVar[Datatype | None] = None

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        """Whether `to_tensor` takes this value without being asked for this content type."""
        return False

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        """The tensor of a value, with the content type in its parameters. Raises InvalidInput."""
        raise NotImplementedError

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        """The value of a tensor. Raises InvalidInput naming `where` (`input 'x'`) and the first bad element."""
        raise NotImplementedError

    # --- what clients and models call ------------------------------------------------------------------------

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
    """Values that a whole request or answer makes up. `type_hint` is the annotation that means this content type."""

    content_type: ClassVar[str]
    type_hint: ClassVar[Any] = None

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        """Whether `to_tensors` takes this value without being asked for this content type."""
        return False

    @classmethod
    def to_tensors(cls, value: Any, noun: str = "input", **options: Any) -> dict[str, Tensor]:
        """The named tensors of a value; `noun` is "input" or "output", for those that have no name of their own."""
        raise NotImplementedError

    @classmethod
    def to_value(cls, tensors: Mapping[str, Tensor], noun: str = "input") -> Any:
        """The value of named tensors, in order. Raises InvalidInput naming the tensor and its first bad element."""
        raise NotImplementedError

    # --- what clients and models call ------------------------------------------------------------------------

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
    """A request or answer of one tensor, which `codec` speaks for; of several tensors only the first counts."""

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
        raise InvalidInput(f"content type '{cls.content_type}' expects one {noun}, got none")
