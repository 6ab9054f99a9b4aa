"""Which content type counts: what the request says, then the model's settings, then a type hint, then none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dragoman.codecs.codec import FirstTensorCodec, InputCodec, RequestCodec
from dragoman.codecs.registry import CODECS
from dragoman.core.bytes_tensor import with_parameters
from dragoman.core.calls import Infer, Inference
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import NONE, Tensor

KEY = "content_type"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a model's settings say of content types: for the whole request, and for an input by its name."""

    request: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: ModelSpec, inputs: tuple[TensorSpec, ...] = ()) -> "Defaults":
        """From what the operator says, before what the model itself tells of its `inputs`."""
        named = {i.name: i.content_type for i in (*inputs, *spec.inputs) if i.content_type}
        return cls(str(spec.parameters.get(KEY) or ""), named)


NO_DEFAULTS = Defaults()


# --- the way in ------------------------------------------------------------------------------------------


def input_codec(name: str, tensor: Tensor, default: str = "", hint: Any = None) -> type[InputCodec] | None:
    """The codec of an input; None where nothing says any. InvalidInput where its content type is not known."""
    content_type = tensor.parameters.get(KEY) or default
    if content_type:
        return CODECS.input(str(content_type), f"input '{name}'")
    return None if hint is None else CODECS.hinted_input(hint)


def decode_input(name: str, tensor: Tensor, default: str = "", hint: Any = None) -> Any:
    """The value of an input: by its own content type, by the model's for it, by a type hint, or its array."""
    codec = input_codec(name, tensor, default, hint)
    return tensor.data if codec is None else codec.to_value(tensor, f"input '{name}'")


def decode_inputs(tensors: Mapping[str, Tensor], defaults: Defaults = NO_DEFAULTS) -> dict[str, Any]:
    """The value of each input by its name."""
    return {name: decode_input(name, t, defaults.inputs.get(name, "")) for name, t in tensors.items()}


def decode_request(call: Infer, defaults: Defaults = NO_DEFAULTS, hint: Any = None) -> Any:
    """The value of a whole call, by its own content type, by the model's, or by a type hint.

    Where nothing says any, it is the value of each input by its name. Raises InvalidInput naming what does not fit.
    """
    codec = request_codec(call, defaults, hint)
    if codec is None:
        return decode_inputs(call.inputs, defaults)
    return codec.to_value(with_defaults(call.inputs, defaults), "input")


def request_codec(call: Infer, defaults: Defaults = NO_DEFAULTS, hint: Any = None) -> type[RequestCodec] | None:
    """The codec of a whole call; None where nothing says any. InvalidInput where its content type is not known."""
    content_type = call.parameters.get(KEY) or defaults.request
    if not content_type:
        return None if hint is None else CODECS.hinted_request(hint)
    found = CODECS.request(str(content_type))
    if found is None:
        raise InvalidInput(
            f"content type '{content_type}' is not known for a whole request; expected one of "
            f"{', '.join(CODECS.request_types())}"
        )
    return found


def with_defaults(tensors: Mapping[str, Tensor], defaults: Defaults) -> Mapping[str, Tensor]:
    """The inputs, each of which names the content type that the model has for it, unless it names one itself."""
    if not defaults.inputs:
        return tensors
    return {
        name: with_parameters(t, {**t.parameters, KEY: defaults.inputs[name]})
        if name in defaults.inputs and not t.parameters.get(KEY)
        else t
        for name, t in tensors.items()
    }


# --- the way out -----------------------------------------------------------------------------------------


def encode_answer(value: Any, content_type: str = "", names: tuple[str, ...] = ()) -> Inference:
    """The answer in any value that a codec takes: a data frame, a dict of outputs, a tuple of them, or one.

    `content_type` asks for one at the level of the whole answer. Outputs without names of their own are called as
    in `names`, or else `output-0`, `output-1`, ... Raises InvalidOutput naming an output that no codec takes.
    """
    match value:
        case Inference():
            return value
        case Mapping() if not content_type:
            return Inference({str(name): encode_output(str(name), each) for name, each in value.items()})
        case tuple() if not content_type:
            called = (*names, *(f"output-{i}" for i in range(len(names), len(value))))
            return Inference({n: encode_output(n, each) for n, each in zip(called, value, strict=False)})
    codec = CODECS.request(content_type) if content_type else CODECS.request_for(value)
    if codec is None or (not content_type and issubclass(codec, FirstTensorCodec)):
        return Inference({(name := (names or ("output-0",))[0]): encode_output(name, value)})
    try:
        return Inference(codec.to_tensors(value, "output"), codec.parameters())
    except DragomanError as bad:
        raise InvalidOutput(bad.message) from bad


def encode_output(name: str, value: Any, content_type: str = "") -> Tensor:
    """One output, by its content type, or by the first codec that takes such a value. Raises InvalidOutput."""
    if isinstance(value, Tensor):
        return value
    try:
        codec = CODECS.input(content_type, f"output '{name}'") if content_type else CODECS.input_for(value)
        return Tensor.of(value, parameters=NONE) if codec is None else codec.to_tensor(value)
    except DragomanError as bad:
        raise InvalidOutput(f"output '{name}': {bad.message}") from bad
    except (TypeError, ValueError) as bad:
        raise InvalidOutput(f"output '{name}': no codec takes {type(value).__name__}") from bad
