"""`decode_args`: decode the inputs of a method and encode its results by its annotations."""

import functools
import inspect
import types
from collections.abc import Awaitable, Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

from dragoman.core.errors import InvalidInput
from dragoman.core.type_aliases import without_aliases
from dragoman_mlserver.mlserver.codecs.base import (
    find_input_codec_by_payload,
    find_input_codec_by_type_hint,
    find_request_codec_by_payload,
    find_request_codec_by_type_hint,
)
from dragoman_mlserver.mlserver.codecs.errors import InputsNotFound, OutputNotFound
from dragoman_mlserver.mlserver.codecs.utils import DefaultOutputPrefix, decode_request_input
from dragoman_mlserver.mlserver.types import InferenceRequest, InferenceResponse, RequestInput, ResponseOutput


def decode_args(predict: Callable[..., Any]) -> Callable[[Any, InferenceRequest], Awaitable[InferenceResponse]]:
    """Return the method as one that takes an InferenceRequest and returns an InferenceResponse.

    Each parameter is the input with its name; one annotated with the type of a request codec (a DataFrame) takes all
    inputs that no other parameter names. Inputs with a default or `Optional` may be missing. Results are named
    `output-0`, `output-1`, ...; columns of a DataFrame and ResponseOutputs keep their names.
    """
    signature = inspect.signature(predict)
    hints = {name: without_aliases(hint, _has_codec) for name, hint in get_type_hints(predict).items()}
    parameters = {n: p for n, p in signature.parameters.items() if n != "self"}
    result_hints = _result_hints(hints.get("return"))

    @functools.wraps(predict)
    async def infer(self: Any, payload: InferenceRequest) -> InferenceResponse:
        result = predict(self, **_arguments(self, payload, parameters, hints))
        if inspect.isawaitable(result):
            result = await result
        return _response(self, result, result_hints)

    return infer


def _has_codec(hint: Any) -> bool:
    return find_input_codec_by_type_hint(hint) is not None or find_request_codec_by_type_hint(hint) is not None


def _arguments(
    model: Any, payload: InferenceRequest, parameters: dict[str, inspect.Parameter], hints: dict[str, Any]
) -> dict[str, Any]:
    inputs = {each.name: each for each in payload.inputs}
    arguments: dict[str, Any] = {}
    rest_name = ""
    for name, parameter in parameters.items():
        hint, optional = _unwrap_optional(hints.get(name))
        if find_input_codec_by_type_hint(hint) is None and find_request_codec_by_type_hint(hint) is not None:
            rest_name = name
        elif name in inputs:
            arguments[name] = _value(model, inputs.pop(name), hint)
        elif parameter.default is inspect.Parameter.empty:
            if not optional:
                expected = ", ".join(f"'{n}'" for n in parameters)
                raise InvalidInput(f"input '{name}' is missing: expected inputs {expected}")
            arguments[name] = None
    if rest_name:
        hint, _ = _unwrap_optional(hints[rest_name])
        codec: Any = find_request_codec_by_type_hint(hint)
        rest = payload.model_copy(update={"inputs": list(inputs.values())})
        arguments[rest_name] = codec.decode_request(rest)
    elif inputs:
        raise InputsNotFound(list(inputs.values()), parameters)
    return arguments


def _value(model: Any, given: RequestInput, hint: Any) -> Any:
    """Decode an input by the content type of the request, the metadata or the annotation, in this order."""
    value = decode_request_input(given, {m.name: m for m in model.inputs})
    if value is not None:
        return value
    codec = find_input_codec_by_type_hint(hint)
    return given.data if codec is None else codec.decode_input(given)


def _response(model: Any, result: Any, hints: list[Any]) -> InferenceResponse:
    if isinstance(result, InferenceResponse):
        return result
    values = list(result) if isinstance(result, tuple) or _all_outputs(result) else [result]
    outputs: list[ResponseOutput] = []
    for at, value in enumerate(values):
        outputs += _outputs(at, value, hints)
    return InferenceResponse(model_name=model.name, model_version=model.version, outputs=outputs)


def _all_outputs(result: Any) -> bool:
    return isinstance(result, list) and bool(result) and all(isinstance(each, ResponseOutput) for each in result)


def _outputs(at: int, value: Any, hints: list[Any]) -> list[ResponseOutput]:
    if isinstance(value, ResponseOutput):
        return [value]
    hint = hints[at] if at < len(hints) else None
    codec = find_input_codec_by_type_hint(hint) or find_input_codec_by_payload(value)
    if codec is not None:
        return [codec.encode_output(f"{DefaultOutputPrefix}{at}", value)]
    request_codec = find_request_codec_by_type_hint(hint) or find_request_codec_by_payload(value)
    if request_codec is None:
        raise OutputNotFound(at, type(value), hints)
    return request_codec.encode_response("", value).outputs


def _result_hints(hint: Any) -> list[Any]:
    if hint is None:
        return []
    return list(get_args(hint)) if get_origin(hint) is tuple else [hint]


def _unwrap_optional(hint: Any) -> tuple[Any, bool]:
    """Return the annotation without `Optional`, and whether it had it."""
    if get_origin(hint) in (Union, types.UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        return (rest[0] if len(rest) == 1 else hint), len(rest) < len(get_args(hint))
    return hint, False
