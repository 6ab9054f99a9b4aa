"""A parameter of a typed function: which input it is, and how its value is made."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dragoman.codecs.annotations import conversion, optional
from dragoman.codecs.codec import RequestCodec
from dragoman.codecs.conversion import Conversion
from dragoman.codecs.decode import KEY, Defaults, with_defaults
from dragoman.codecs.registry import CODECS
from dragoman.core.bytes_tensor import with_parameters
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Parameters, Tensor, object_array


@dataclass(frozen=True)
class Argument:
    """One parameter of the function.

    `role`: an input, the call, the call's parameters, all other inputs, or a `table` that `codec` makes of them.
    `required`: it has no default, so that a missing optional one is None.
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
        """The value of the input: of its own content type, of the model's `default`, or of the annotation.

        Where the annotation asks for another type than the content type gives, it decides.
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
        fits, value = _fitted(codec.to_value(tensor, f"input '{self.name}'"), self.conversion, tensor)
        return value if fits else self.conversion.to_value(tensor, self.name)

    def table(self, rest: Mapping[str, Tensor], defaults: Defaults) -> Any:
        """The value of all inputs that no other parameter names."""
        assert self.codec is not None
        if not rest:
            raise InvalidInput(f"expected inputs that make up '{self.name}', got none")
        return self.codec.to_value(with_defaults(rest, defaults), "input")


_NUMBERS = (float, int, bool)


def _fitted(value: Any, wanted: Conversion, tensor: Tensor) -> tuple[bool, Any]:
    """Whether what a codec gave is of the wanted kind, perhaps as the only element of a list; and it."""
    if wanted.many:
        return isinstance(value, list) and all(isinstance(each, wanted.kind) for each in value), value
    if isinstance(value, wanted.kind):
        return True, value
    if wanted.kind is np.ndarray:
        whole = isinstance(value, list) and len(value) == tensor.data.size
        return whole, object_array(value, tensor.data.shape) if whole else None
    single = isinstance(value, list) and len(value) == 1 and isinstance(value[0], wanted.kind)
    return single, value[0] if single else None


def argument(parameter: inspect.Parameter, function: str) -> Argument:
    """What a parameter is. Raises ModelFailed naming one that can be no input."""
    name, annotation = parameter.name, parameter.annotation
    if parameter.kind is parameter.VAR_POSITIONAL:
        raise ModelFailed(f"parameter '*{name}' of {function} has no name to be an input; expected named parameters")
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
    found = conversion(plain, f"parameter '{name}' of {function}")
    spec = TensorSpec(
        name, found.datatype, found.shape, found.accepts, nullable or not required, content_type=found.content_type
    )
    return Argument(name, "input", found, spec, required, positional_only)


def arguments(declared: inspect.Signature, function: str) -> list[Argument]:
    """What every parameter is; ModelFailed where more than one asks for all other inputs."""
    found = [argument(p, function) for p in declared.parameters.values()]
    rest = [a.name for a in found if a.role in ("table", "others")]
    if len(rest) > 1:
        raise ModelFailed(f"parameters {', '.join(map(repr, rest))} of {function} all take the inputs that are left")
    return found


def table_codec(annotation: Any) -> type[RequestCodec] | None:
    """The codec of an annotation that a whole request makes up, such as pd.DataFrame; None where it is none."""
    if not isinstance(annotation, type) or annotation is np.ndarray:
        return None
    if CODECS.own_input(annotation) is not None or annotation.__module__ == "builtins":
        return None
    return CODECS.hinted_request(annotation)
