"""Requests and responses of the V2 protocol, as models and clients of KServe use them.

The arrays of a request become lists only if a model reads `data`.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import orjson

from dragoman.compat.kserve.errors import InferenceError, InvalidInput
from dragoman.compat.kserve.numpy_codec import from_np_dtype, to_np_dtype
from dragoman.compat.kserve.tensor_data import (
    BINARY_SIZE,
    CONTENTS,
    bytes_from_raw,
    elements,
    from_body,
    from_message,
    is_array,
    plain_parameters,
    set_raw,
    texts,
    to_body,
    to_raw,
    write_parameters,
    write_tensors,
)
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.tensor import Tensor, object_array
from dragoman.formats.oip_messages import ModelInferRequest, ModelInferResponse


class NamedArray:
    """A named input or output. Its data are a list or an array, or bytes in raw encoding."""

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        datatype: str,
        data: Any = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.shape, self.datatype = name, shape, datatype.upper()
        self.parameters: Any = parameters
        self._data = data
        self._raw_data: bytes | None = None
        self._tensor: Tensor | None = None

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor) -> Self:
        """Return a tensor as an instance; the array is not copied."""
        instance = cls(name, list(tensor.shape), tensor.datatype.name, parameters=dict(tensor.parameters))
        instance._tensor = tensor
        return instance

    @property
    def data(self) -> Any:
        """The elements as a flat list, or what was set; None if they are raw."""
        if self._tensor is not None:  # the caller may change the list, which replaces the array
            self._data, self._tensor = elements(self._tensor), None
        return self._data

    @data.setter
    def data(self, data: Any) -> None:
        self._data, self._tensor = data, None

    @property
    def raw_data(self) -> bytes | None:
        return self._raw_data

    def set_raw_data(self, raw: bytes) -> None:
        self._raw_data = raw
        self._data = self._tensor = None

    def as_numpy(self) -> Array:
        """Return a new array; BYTES as an array of objects. Raises InvalidInput for an unknown datatype."""
        dtype = to_np_dtype(self.datatype)
        if dtype is None:
            raise InvalidInput(f"invalid datatype {self.datatype} in the input")
        tensor = self._tensor
        if self._raw_data is not None:
            if self.datatype == BYTES.name:
                return bytes_from_raw(self.name, self.shape, self._raw_data)
            return np.frombuffer(self._raw_data, dtype).reshape(self.shape)
        if tensor is None:
            return np.array(self._data, dtype=dtype).reshape(self.shape)
        if tensor.datatype is BYTES:
            return object_array(elements(tensor), tensor.shape).reshape(self.shape)
        return np.array(tensor.data, dtype=dtype).reshape(self.shape)

    def as_string(self) -> list[str]:
        """Return the elements of BYTES as text. Raises InvalidInput for another datatype."""
        if self.datatype != BYTES.name:
            raise InvalidInput(f"invalid datatype {self.datatype} in the input")
        return [each.decode() if isinstance(each, bytes) else str(each) for each in self.as_numpy().flat]

    def set_data_from_numpy(self, input_tensor: Any, binary_data: bool = True) -> None:
        """Set the data from an array of the same datatype and shape. Raises InferenceError.

        binary_data: keep them in raw encoding, instead of as a list.
        """
        if not isinstance(input_tensor, np.ndarray):
            raise InferenceError("input_tensor must be a numpy array")
        datatype = from_np_dtype(input_tensor.dtype)
        if datatype != self.datatype:
            raise InferenceError(f"got unexpected datatype {datatype} from numpy array, expected {self.datatype}")
        if list(input_tensor.shape) != list(self.shape):
            given, expected = (", ".join(map(str, shape)) for shape in (input_tensor.shape, self.shape))
            raise InferenceError(f"got unexpected numpy array shape [{given}], expected [{expected}]")
        if input_tensor.dtype.kind == "M":
            input_tensor = input_tensor.astype(np.object_)
        self._tensor, self._data, self._raw_data = None, None, None
        parameters = {k: v for k, v in (self.parameters or {}).items() if k != BINARY_SIZE}
        if binary_data:
            self._raw_data = to_raw(input_tensor)
            self.parameters = {**parameters, BINARY_SIZE: len(self._raw_data)}
        else:
            self._data = texts(input_tensor) if self.datatype == BYTES.name else input_tensor.ravel().tolist()
            self.parameters = parameters if self.parameters is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the tensor."""
        return {
            "name": self.name,
            "shape": self.shape,
            "datatype": self.datatype,
            "data": self.data,
            "parameters": None if self.parameters is None else plain_parameters(self.parameters),
        }

    def to_rest(self, *, binary: bool) -> tuple[dict[str, Any], list[bytes]]:
        """Return the tensor as values for JSON, and its raw data if it is sent so. Raises InvalidInput."""
        if self.data is None and self._raw_data is None:
            raise InvalidInput(f"'data' field is missing for '{self.name}'")
        if (binary and self._raw_data is None) or (not binary and self._raw_data is not None) or is_array(self.data):
            self.set_data_from_numpy(self.as_numpy(), binary_data=binary)
        if self.datatype == "FP16" and self._raw_data is None:
            raise InvalidInput(
                "Sending FP16 data via JSON is not supported. Please use the binary data format for " + self.name
            )
        fields: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "datatype": self.datatype}
        if self.parameters:
            fields["parameters"] = plain_parameters(self.parameters)
        if self._raw_data is not None:
            return fields, [self._raw_data]
        data = [each.decode() if isinstance(each, bytes) else each for each in self.data]
        return {**fields, "data": data}, []

    def to_message(self, message: Any) -> bytes | None:
        """Write the tensor into a message of gRPC; return its raw data, None if the message has typed contents."""
        if is_array(self.data):
            self.set_data_from_numpy(self.data)
        message.name, message.datatype = self.name, self.datatype
        message.shape.extend(self.shape)
        write_parameters(message.parameters, self.parameters)
        if self._raw_data is None:
            field = CONTENTS.get(self.datatype)
            if field is None or not isinstance(self.data, list):
                raise InvalidInput(f"'{self.name}': expected a list of {' or '.join(CONTENTS)}, got {self.datatype}")
            data = [each.encode() if isinstance(each, str) else each for each in self.data]
            getattr(message.contents, field).extend(data)
        return self._raw_data

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        return self.to_dict() == other.to_dict() and self._raw_data == other._raw_data

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"


class InferInput(NamedArray):
    """An input of a request."""


class InferOutput(NamedArray):
    """An output of a response."""


class RequestedOutput:
    """An output that a request asks for."""

    def __init__(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        self.name, self.parameters = name, parameters

    @property
    def binary_data(self) -> bool | None:
        return (self.parameters or {}).get("binary_data")

    def to_rest(self) -> dict[str, Any]:
        """Return the output as values for JSON."""
        parameters = plain_parameters(self.parameters)
        return {"name": self.name, **({"parameters": parameters} if parameters else {})}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestedOutput) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class InferMessage:
    """Fields and comparison of requests and responses.

    _tensors, _compared: attributes with the tensors, and with a field to compare besides those of `to_dict`.
    """

    _tensors = ""
    _compared = ""

    id: str | None
    model_name: str
    parameters: Mapping[str, Any] | None
    from_grpc: Any

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the message."""
        return {
            "id": self.id,
            "model_name": self.model_name,
            self._tensors: [each.to_dict() for each in getattr(self, self._tensors)],
            "parameters": None if self.parameters is None else plain_parameters(self.parameters),
            "from_grpc": self.from_grpc,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return False
        return self.to_dict() == other.to_dict() and getattr(self, self._compared) == getattr(other, self._compared)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"


class InferRequest(InferMessage):
    """A request of the V2 protocol."""

    _tensors, _compared = "inputs", "request_outputs"

    def __init__(
        self,
        model_name: str,
        infer_inputs: list[InferInput],
        request_id: str | None = None,
        raw_inputs: Iterable[bytes] | None = None,
        from_grpc: bool | None = False,
        parameters: Mapping[str, Any] | None = None,
        request_outputs: list[RequestedOutput] | None = None,
        model_version: str | None = None,
    ) -> None:
        self.id, self.model_name, self.model_version = request_id, model_name, model_version
        self.inputs, self.parameters, self.request_outputs = infer_inputs, parameters, request_outputs
        self.from_grpc = from_grpc
        raw = list(raw_inputs or ())
        self._use_raw_outputs = bool(raw)
        set_raw(self.inputs, raw)

    @property
    def use_binary_outputs(self) -> bool:
        """Whether the request asks for all outputs in raw encoding."""
        if self.from_grpc:
            return self._use_raw_outputs
        return bool((self.parameters or {}).get("binary_data_output", False))

    @classmethod
    def _from_message(cls, request: Any) -> "InferRequest":
        """Return the request of a message ModelInferRequest."""
        outputs = [RequestedOutput(each.name, plain_parameters(each.parameters) or None) for each in request.outputs]
        return cls(
            request.model_name,
            [from_message(InferInput, each) for each in request.inputs],
            request.id,
            request.raw_input_contents,
            True,
            plain_parameters(request.parameters),
            outputs or None,
            request.model_version,
        )

    # A method of the class; an instance has an attribute of this name.
    from_grpc: Any = _from_message

    @classmethod
    def from_rest(cls, model_name: str, request: Mapping[str, Any]) -> "InferRequest":
        """Return the request of a JSON object."""
        return cls.from_bytes(body := orjson.dumps(request), len(body), model_name)

    @classmethod
    def from_bytes(cls, req_bytes: bytes, json_length: int, model_name: str) -> "InferRequest":
        """Return the request in a body of REST, whose JSON may be followed by raw data. Raises InvalidInput."""
        fields, inputs = from_body(InferInput, req_bytes, json_length, "inputs")
        outputs = [RequestedOutput(each["name"], each.get("parameters")) for each in fields.get("outputs") or ()]
        return cls(
            model_name,
            inputs,
            fields.get("id"),
            parameters=fields.get("parameters"),
            request_outputs=outputs or None,
        )

    def to_rest(self) -> tuple[dict[str, Any] | bytes, int | None]:
        """Return the body of REST: a JSON object and None, or bytes and the length of the JSON in them."""
        fields: dict[str, Any] = {"id": self.id or str(uuid.uuid4()), "model_name": self.model_name}
        rest = [each.to_rest(binary=each.raw_data is not None) for each in self.inputs]
        fields["inputs"] = [tensor for tensor, _ in rest]
        if self.request_outputs:
            fields["outputs"] = [each.to_rest() for each in self.request_outputs]
        if self.parameters:
            fields["parameters"] = plain_parameters(self.parameters)
        return to_body(fields, [raw for _, blobs in rest for raw in blobs])

    def to_grpc(self) -> Any:
        """Return the message ModelInferRequest. Raises InvalidInput."""
        message = ModelInferRequest(
            id=self.id or "", model_name=self.model_name, model_version=self.model_version or ""
        )
        write_parameters(message.parameters, self.parameters)
        for output in self.request_outputs or ():
            write_parameters(message.outputs.add(name=output.name).parameters, output.parameters)
        message.raw_input_contents.extend(write_tensors(self.inputs, message.inputs.add))
        return message

    def as_dataframe(self) -> Any:
        """Return the inputs as the columns of a data frame."""
        import pandas as pd

        frames = [
            pd.DataFrame(each.as_string() if each.datatype == BYTES.name else each.as_numpy(), columns=[each.name])
            for each in self.inputs
        ]
        return pd.concat(frames, axis=1)

    def get_input_by_name(self, name: str) -> InferInput | None:
        return next((each for each in self.inputs if each.name == name), None)


class InferResponse(InferMessage):
    """A response of the V2 protocol."""

    _tensors, _compared = "outputs", "model_version"

    def __init__(
        self,
        response_id: str | None,
        model_name: str,
        infer_outputs: list[InferOutput],
        model_version: str | None = None,
        raw_outputs: Iterable[bytes] | None = None,
        from_grpc: bool | None = False,
        parameters: Mapping[str, Any] | None = None,
        use_binary_outputs: bool | None = False,
        requested_outputs: list[RequestedOutput] | None = None,
    ) -> None:
        self.id, self.model_name, self.model_version = response_id, model_name, model_version
        self.outputs, self.parameters, self.from_grpc = infer_outputs, parameters, from_grpc
        self._use_binary_outputs, self._requested_outputs = bool(use_binary_outputs), requested_outputs
        set_raw(self.outputs, list(raw_outputs or ()))

    @classmethod
    def _from_message(cls, response: Any) -> "InferResponse":
        """Return the response of a message ModelInferResponse."""
        return cls(
            response.id,
            response.model_name,
            [from_message(InferOutput, each) for each in response.outputs],
            response.model_version,
            response.raw_output_contents,
            True,
            plain_parameters(response.parameters),
        )

    # A method of the class; an instance has an attribute of this name.
    from_grpc: Any = _from_message

    @classmethod
    def from_rest(cls, response: Mapping[str, Any]) -> "InferResponse":
        """Return the response of a JSON object."""
        return cls.from_bytes(body := orjson.dumps(response), len(body))

    @classmethod
    def from_bytes(cls, res_bytes: bytes, json_length: int) -> "InferResponse":
        """Return the response in a body of REST, whose JSON may be followed by raw data. Raises InvalidInput."""
        fields, outputs = from_body(InferOutput, res_bytes, json_length, "outputs")
        return cls(
            fields.get("id"),
            fields.get("model_name", ""),
            outputs,
            fields.get("model_version"),
            parameters=fields.get("parameters"),
        )

    def to_rest(self) -> tuple[dict[str, Any] | bytes, int | None]:
        """Return the body of REST: a JSON object and None, or bytes and the length of the JSON in them."""
        if self._requested_outputs:
            rest = [self._output(each.name).to_rest(binary=bool(each.binary_data)) for each in self._requested_outputs]
        else:
            rest = [each.to_rest(binary=self._use_binary_outputs) for each in self.outputs]
        fields: dict[str, Any] = {
            "id": self.id,
            "model_name": self.model_name,
            "model_version": self.model_version,
            "outputs": [tensor for tensor, _ in rest],
        }
        if self.parameters:
            fields["parameters"] = plain_parameters(self.parameters)
        return to_body(fields, [raw for _, blobs in rest for raw in blobs])

    def to_grpc(self) -> Any:
        """Return the message ModelInferResponse: raw if all outputs are, or if one is FP16. Raises InvalidInput."""
        message = ModelInferResponse(
            id=self.id or "", model_name=self.model_name, model_version=self.model_version or ""
        )
        write_parameters(message.parameters, self.parameters)
        if self._use_binary_outputs or any(each.datatype == "FP16" for each in self.outputs):
            for each in self.outputs:
                each.set_data_from_numpy(each.as_numpy())
        message.raw_output_contents.extend(write_tensors(self.outputs, message.outputs.add))
        return message

    def get_output_by_name(self, name: str) -> InferOutput | None:
        return next((each for each in self.outputs if each.name == name), None)

    def _output(self, name: str) -> InferOutput:
        output = self.get_output_by_name(name)
        if output is None:
            raise InvalidInput(f"Unexpected inference output '{name}' for model '{self.model_name}'")
        return output
