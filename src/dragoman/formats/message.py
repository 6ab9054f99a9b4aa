"""Open Inference requests and responses as typed objects, to and from dicts, JSON and the binary form."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dragoman.core.datatypes import BYTES, Array, datatype
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman.formats import fast_json
from dragoman.formats.body import parse_parameters, parse_request, parse_response, serialize_tensors, split_body
from dragoman.formats.json_data import tensor_from_json
from dragoman.formats.policy import Buffer, Policy

# Limits protect servers; clients and models trust the messages that they parse here.
_POLICY = Policy(max_json_values=1 << 62, max_json_bytes=1 << 62, max_bytes_elements=1 << 31)


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensor:
    """A tensor with its name: an input of a request, or an output of a response."""

    name: str
    tensor: Tensor

    def __post_init__(self) -> None:
        _check_types(type(self).__name__, "tensor", [self.tensor], Tensor, "Tensor.of(array) makes one")

    @property
    def datatype(self) -> str:
        """The datatype's name on the wire."""
        return self.tensor.datatype.name

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    @property
    def parameters(self) -> Parameters:
        return self.tensor.parameters

    @property
    def data(self) -> Array:
        """The elements, in their shape; see `Tensor`."""
        return self.tensor.data

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values with flat `data`. NaN is None; bytes that are not UTF-8 stay bytes."""
        fields: dict[str, Any] = {
            "name": self.name,
            "datatype": self.datatype,
            "shape": self.shape,
            "data": elements(self.tensor),
        }
        return fields | ({"parameters": dict(self.parameters)} if self.parameters else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a tensor from plain JSON values, checked as a server checks them. Raises InvalidInput."""
        name, kind, shape = values["name"], datatype(values["datatype"]), values["shape"]
        parameters = values.get("parameters") or NONE
        return cls(name, tensor_from_json(f"tensor '{name}'", kind, shape, values["data"], _POLICY, parameters))


class RequestInput(NamedTensor):
    """An input of a request."""

    __slots__ = ()


class ResponseOutput(NamedTensor):
    """An output of a response."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """An output that a request names."""

    name: str
    parameters: Parameters = NONE

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name} | ({"parameters": dict(self.parameters)} if self.parameters else {})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferenceRequest:
    """A request: its inputs in order, and the outputs that it names (none: the default outputs of the model)."""

    inputs: list[RequestInput]
    outputs: list[RequestOutput] = field(default_factory=list)
    parameters: Parameters = NONE
    id: str = ""

    def __post_init__(self) -> None:
        hint = "InferenceRequest.from_dict reads plain JSON values"
        _check_types("InferenceRequest", "inputs", self.inputs, RequestInput, hint)
        _check_types("InferenceRequest", "outputs", self.outputs, RequestOutput, hint)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The inputs by name."""
        return {i.name: i.tensor for i in self.inputs}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, for example for `requests.post(json=...)`."""
        return self._with_fields([i.to_dict() for i in self.inputs], self.parameters)

    def to_json(self) -> bytes:
        """Return JSON. Raises NotSupported if JSON cannot carry an element."""
        inputs, _ = serialize_tensors(self.tensors, lambda _: False, _POLICY, "input", at_once=True)
        return fast_json.dumps(self._with_fields(inputs, self.parameters))

    def to_binary(self, *, binary_output: bool = True) -> tuple[list[Buffer], int]:
        """Return the buffers of a body in binary form, and the length of its JSON for the header."""
        inputs, blobs = serialize_tensors(self.tensors, lambda _: True, _POLICY, "input")
        parameters = {**self.parameters, **({"binary_data_output": True} if binary_output else {})}
        head = fast_json.dumps(self._with_fields(inputs, parameters))
        return [head, *blobs], len(head)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parse plain JSON values. Raises InvalidInput."""
        return cls.from_json(fast_json.dumps(values))

    @classmethod
    def from_json(cls, text: Buffer, header_length: str | None = None) -> Self:
        """Parse JSON, or with the value of the length header the binary form. Raises InvalidInput."""
        body = parse_request(*split_body(text, header_length), _POLICY)
        return cls(
            inputs=[RequestInput(name, tensor) for name, tensor in body.inputs.items()],
            outputs=[RequestOutput(o.name, parse_parameters(o.parameters) or NONE) for o in body.outputs],
            parameters=body.parameters,
            id=body.id or "",
        )

    def _with_fields(self, inputs: list[dict[str, Any]], parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **({"id": self.id} if self.id else {}),
            **({"parameters": dict(parameters)} if parameters else {}),
            "inputs": inputs,
            **({"outputs": [o.to_dict() for o in self.outputs]} if self.outputs else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferenceResponse:
    """A response: its outputs in order, and the model."""

    outputs: list[ResponseOutput]
    model_name: str = ""
    model_version: str = ""
    parameters: Parameters = NONE
    id: str = ""

    def __post_init__(self) -> None:
        hint = "InferenceResponse.from_dict reads plain JSON values"
        _check_types("InferenceResponse", "outputs", self.outputs, ResponseOutput, hint)

    @classmethod
    def of(cls, outputs: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], **fields: Any) -> Self:
        """Create a response from tensors by name."""
        return cls(outputs=[ResponseOutput(name, tensor) for name, tensor in dict(outputs).items()], **fields)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The outputs by name."""
        return {o.name: o.tensor for o in self.outputs}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return self._with_fields([o.to_dict() for o in self.outputs])

    def to_json(self) -> bytes:
        """Return JSON. Raises NotSupported if JSON cannot carry an element."""
        outputs, _ = serialize_tensors(self.tensors, lambda _: False, _POLICY, at_once=True)
        return fast_json.dumps(self._with_fields(outputs))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parse plain JSON values. Raises InvalidInput."""
        return cls.from_json(fast_json.dumps(values))

    @classmethod
    def from_json(cls, text: Buffer, header_length: str | None = None) -> Self:
        """Parse JSON, or with the value of the length header the binary form. Raises InvalidInput."""
        body = parse_response(*split_body(text, header_length), _POLICY)
        return cls.of(
            body.outputs,
            model_name=body.model_name,
            model_version=body.model_version or "",
            parameters=body.parameters,
            id=body.id or "",
        )

    def _with_fields(self, outputs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **({"id": self.id} if self.id else {}),
            "model_name": self.model_name,
            **({"model_version": self.model_version} if self.model_version else {}),
            **({"parameters": dict(self.parameters)} if self.parameters else {}),
            "outputs": outputs,
        }


def _check_types(owner: str, name: str, values: Iterable[Any], kind: type, hint: str) -> None:
    """Raise TypeError unless all values of an attribute are of one type."""
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{owner}: '{name}': expected {kind.__name__}, got {type(value).__name__}; {hint}")


def elements(tensor: Tensor) -> list[Any]:
    """Return the elements, flat: `str` for BYTES that are UTF-8, None for NaN."""
    if tensor.datatype is BYTES:
        return [_text(element) for element in tensor.data.flat]
    return [None if v != v else v for v in tensor.data.reshape(-1).tolist()]


def _text(element: bytes) -> str | bytes:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element
