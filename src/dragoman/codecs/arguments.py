"""Parameters of a typed function: which input each one takes, and its value in a call."""

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from dragoman.codecs.annotations import Conversion, conversion_of, optional
from dragoman.codecs.codec import CODECS, RequestCodec
from dragoman.codecs.decode import KEY, Defaults, with_defaults
from dragoman.core.bytes_tensor import with_parameters
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Parameters, Tensor, object_array


class Argument(msgspec.Struct, frozen=True):
    """A parameter of a typed function.

    role: "input"; "call", the whole call; "parameters", those of the call; "others", all inputs that no other
        parameter names; or "table", the value that `codec` decodes from these.
    required: it has no default; a missing optional input is None.
    """

    name: str
    role: str
    conversion: Conversion | None = None
    spec: TensorSpec | None = None
    required: bool = True
    positional_only: bool = False
    codec: type[RequestCodec] | None = None
    nullable: bool = False

    def value(self, tensor: Tensor, default: str = "") -> Any:
        """Return the value of the input, decoded by its content type, by the model's `default`, or by the annotation.

        The annotation takes precedence over a content type that gives another type.
        """
        assert self.conversion is not None
        content_type = tensor.parameters.get(KEY) or default
        if not content_type:
            return self.conversion.to_value(tensor, self.name)
        if tensor.parameters.get(KEY) is None:
            tensor = with_parameters(tensor, {**tensor.parameters, KEY: content_type})
        codec = CODECS.input(str(content_type), f"input '{self.name}'")
        if self.conversion.kind is None or content_type == self.conversion.content_type:
            return self.conversion.to_value(tensor, self.name)
        if self.conversion.kind in _NUMBERS and tensor.datatype is not BYTES:
            return self.conversion.to_value(tensor, self.name)
        is_match, value = _match(codec.to_value(tensor, f"input '{self.name}'"), self.conversion, tensor)
        return value if is_match else self.conversion.to_value(tensor, self.name)

    def table(self, rest: Mapping[str, Tensor], defaults: Defaults) -> Any:
        """Return the value decoded from all inputs that no other parameter names. Raises InvalidInput."""
        assert self.codec is not None
        if not rest:
            raise InvalidInput(f"expected inputs for '{self.name}', got none")
        return self.codec.to_value(with_defaults(rest, defaults), "input")


_NUMBERS = (float, int, bool)


def _match(value: Any, wanted: Conversion, tensor: Tensor) -> tuple[bool, Any]:
    """Return whether a decoded value, or the only element of a decoded list, has the annotated type; and that value."""
    if wanted.many:
        return isinstance(value, list) and all(isinstance(each, wanted.kind) for each in value), value
    if isinstance(value, wanted.kind):
        return True, value
    if wanted.kind is np.ndarray:
        is_complete = isinstance(value, list) and len(value) == tensor.data.size
        return is_complete, object_array(value, tensor.data.shape) if is_complete else None
    is_single = isinstance(value, list) and len(value) == 1 and isinstance(value[0], wanted.kind)
    return is_single, value[0] if is_single else None


def _argument_of(parameter: inspect.Parameter, function: str) -> Argument:
    """Return what a parameter takes. Raises ModelFailed naming one that cannot be an input."""
    name, annotation = parameter.name, parameter.annotation
    if parameter.kind is parameter.VAR_POSITIONAL:
        raise ModelFailed(f"parameter '*{name}' of {function}: expected named parameters, which become inputs")
    if parameter.kind is parameter.VAR_KEYWORD:
        return Argument(name, "others")
    positional_only = parameter.kind is parameter.POSITIONAL_ONLY
    if annotation == Parameters:
        return Argument(name, "parameters", positional_only=positional_only)
    if annotation is Infer:
        return Argument(name, "call", positional_only=positional_only)
    plain, nullable = optional(Any if annotation is parameter.empty else annotation)
    required = parameter.default is parameter.empty
    codec = table_codec(plain)
    if codec is not None:
        return Argument(name, "table", None, None, required, positional_only, codec, nullable)
    conversion = conversion_of(plain, f"parameter '{name}' of {function}")
    spec = TensorSpec(
        name,
        conversion.datatype,
        conversion.shape,
        conversion.accepts,
        optional=nullable or not required,
        content_type=conversion.content_type,
    )
    return Argument(name, "input", conversion, spec, required, positional_only)


def arguments_of(signature: inspect.Signature, function: str) -> list[Argument]:
    """Return what each parameter takes. Raises ModelFailed if more than one takes all other inputs."""
    arguments = [_argument_of(p, function) for p in signature.parameters.values()]
    rest = [a.name for a in arguments if a.role in ("table", "others")]
    if len(rest) > 1:
        names = ", ".join(map(repr, rest))
        raise ModelFailed(f"{function}: expected one parameter for all other inputs, got {names}")
    return arguments


def table_codec(annotation: Any) -> type[RequestCodec] | None:
    """Return the codec of an annotation for a whole request, such as pd.DataFrame; None for any other."""
    if not isinstance(annotation, type) or annotation is np.ndarray:
        return None
    if CODECS.custom_input_for_hint(annotation) is not None or annotation.__module__ == "builtins":
        return None
    return CODECS.request_for_hint(annotation)
