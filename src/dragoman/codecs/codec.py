"""Base classes of codecs. A codec converts the Python values of one content type to tensors and back.

A custom codec defines `content_type`, `can_encode`, `to_tensor` and `to_value`; all other methods use these. Codecs
have no state, so all methods are class methods. Encoding methods accept the option `use_bytes` of MLServer and ignore
it: BYTES elements are always bytes here, and become text where a request is written as JSON.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from dragoman import plugins
from dragoman.core.datatypes import Datatype
from dragoman.core.errors import InvalidInput, ModelFailed
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


AnyCodec = type[InputCodec] | type[RequestCodec]
C = TypeVar("C", bound=AnyCodec)

# Our content types, in the order in which `can_encode` is called.
_INPUT = ("datetime", "str", "base64", "np", "pillow_image", "pd_json", "json")
_REQUEST = ("pd", "np", "str")


class CodecRegistry:
    """Codecs of single tensors ("input") and of whole requests ("request"), by content type."""

    def __init__(self) -> None:
        self._inputs: dict[str, type[InputCodec]] = {}
        self._requests: dict[str, type[RequestCodec]] = {}
        self._installed = False

    def add(self, codec: C) -> C:
        """Add a codec, which replaces another one of its content type. Can be used as a class decorator."""
        if issubclass(codec, InputCodec):
            self._inputs[codec.content_type] = codec
        else:
            self._requests[codec.content_type] = codec
        return codec

    def remove(self, content_type: str) -> None:
        """Remove the codecs of a content type; built-in and installed ones are found again on their next use."""
        self._inputs.pop(content_type, None)
        self._requests.pop(content_type, None)

    def input(self, content_type: str, where: str = "input") -> type[InputCodec]:
        """Return the codec of a content type for one tensor. Raises InvalidInput naming `where` if there is none."""
        known = self._inputs.get(content_type)
        if known is not None:
            return known
        codec: type[InputCodec] | None = _load("codecs.input", content_type)
        if codec is None:
            expected = ", ".join(sorted({*self._inputs, *_INPUT}))
            raise InvalidInput(f"{where}: unknown content type '{content_type}': expected one of {expected}")
        return self.add(codec)

    def request(self, content_type: str) -> type[RequestCodec] | None:
        """Return the codec of a content type for a whole request; None if there is none."""
        known = self._requests.get(content_type)
        if known is not None:
            return known
        codec: type[RequestCodec] | None = _load("codecs.request", content_type)
        return None if codec is None else self.add(codec)

    def input_for(self, value: Any) -> type[InputCodec] | None:
        """Return the first codec that can encode a value as one tensor; None if there is none."""
        return next((c for c in self._all_inputs() if c.can_encode(value)), None)

    def request_for(self, value: Any) -> type[RequestCodec] | None:
        """Return the first codec that can encode a value as a whole request; None if there is none."""
        return next((c for c in self._all_requests() if c.can_encode(value)), None)

    def input_for_hint(self, hint: Any) -> type[InputCodec] | None:
        """Return the codec of one tensor with this type hint; None if there is none."""
        return next((c for c in self._all_inputs() if _is_same(c.type_hint, hint)), None)

    def request_for_hint(self, hint: Any) -> type[RequestCodec] | None:
        """Return the codec of a whole request with this type hint; None if there is none."""
        has_pandas = "pandas" in sys.modules  # else no hint can be of its types, and importing it takes half a second
        return next((c for c in self._all_requests(has_pandas) if _is_same(c.type_hint, hint)), None)

    def custom_input_for_hint(self, hint: Any) -> type[InputCodec] | None:
        """As `input_for_hint`, among the codecs that are not built in."""
        self._add_plugins()
        return next((c for n, c in self._inputs.items() if n not in _INPUT and _is_same(c.type_hint, hint)), None)

    def request_types(self) -> list[str]:
        return sorted({*self._requests, *_REQUEST})

    def _add_plugins(self) -> None:
        """Add the codecs of entry points, once, except for content types that the code of a model has added."""
        if self._installed:
            return
        self._installed = True
        for group, known in (("codecs.input", self._inputs), ("codecs.request", self._requests)):
            for name in plugins.installed_names(group):
                if name not in known:
                    self.add(plugins.find(group, name))

    def _all_inputs(self) -> Iterator[type[InputCodec]]:
        self._add_plugins()
        yield from [c for name, c in self._inputs.items() if name not in _INPUT]  # custom ones first
        for name in _INPUT:
            with suppress(ModelFailed):  # its package is not installed, so no value can be of its type
                yield self.input(name)

    def _all_requests(self, has_pandas: bool = True) -> Iterator[type[RequestCodec]]:
        self._add_plugins()
        yield from [c for name, c in self._requests.items() if name not in _REQUEST]
        for name in _REQUEST:
            if name == "pd" and not has_pandas:
                continue
            with suppress(ModelFailed):
                codec = self.request(name)
                if codec is not None:
                    yield codec


def _is_same(known: Any, hint: Any) -> bool:
    return known is not None and (known is hint or known == hint)


def _load(group: str, content_type: str) -> Any:
    return plugins.find(group, content_type) if plugins.has(group, content_type) else None


# The registry of this process. Importing the code of a model adds its codecs, in its worker process only.
CODECS = CodecRegistry()
