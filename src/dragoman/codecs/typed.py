"""Serve a typed Python function: its annotations give the signature and the conversion of each call."""

import inspect
from collections import abc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import fields, is_dataclass
from typing import Any, NotRequired, Required, get_args, get_origin, get_type_hints, is_typeddict

import msgspec
import numpy as np

from dragoman.codecs.annotations import Conversion, conversion_of
from dragoman.codecs.annotations import Shape as Shape
from dragoman.codecs.arguments import arguments_of, table_codec
from dragoman.codecs.codec import CODECS
from dragoman.codecs.decode import NO_DEFAULTS, Defaults, decode_inputs, encode_answer
from dragoman.core.calls import Infer, Inference
from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.model import Result, Results
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.core.type_aliases import without_aliases

# Return annotations that say nothing about the outputs: the function may return whatever `Model.infer` may.
_ANY_RESULT: tuple[Any, ...] = (inspect.Signature.empty, Any, Inference, Result, Results, dict, tuple, list)
_STREAMS = (abc.Iterator, abc.Iterable, abc.Generator, abc.AsyncIterator, abc.AsyncIterable, abc.AsyncGenerator)
_SCALARS = (bool, int, float, str, bytes)


class TypedFunction:
    """An annotated callable as a `signature` and a function `infer`.

    `infer` is a plain function, coroutine function or generator function, as the callable is.

    Each parameter is an input with its name: an array, a float, int, bool, str, bytes, datetime, dict or image, a list
    of these, a pd.Series, or the type hint of a custom codec. Inputs with a default or `| None` are optional. A
    parameter annotated pd.DataFrame takes all inputs that no other parameter names, one per column, and `**inputs`
    takes them as they are. `Parameters` takes the parameters of the call, `Infer` the whole call. Inputs with a content
    type, their own or in the model's settings (`defaults`), are decoded by it.

    A single result is `output-0`; a tuple is `output-0`, `output-1`, ...; the fields of a dataclass, NamedTuple or
    TypedDict and the columns of a pd.DataFrame name the outputs. With any other mapping or no annotation, the signature
    has open outputs. Raises ModelFailed naming a parameter with an unsupported annotation.
    """

    def __init__(
        self, function: Callable[..., Any], *, batched: bool = False, defaults: Defaults = NO_DEFAULTS
    ) -> None:
        self._function = function
        self._defaults = defaults
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            signature = _signature_of(function)
        except (NameError, TypeError, ValueError) as error:
            raise ModelFailed(f"the annotations of {name} cannot be evaluated: {error}") from error
        self._arguments = arguments_of(signature, name)
        self._names = frozenset(argument.name for argument in self._arguments if argument.role == "input")
        self._kind, result = _kind(function, signature.return_annotation)
        self._results = _results(result, f"the result of {name}")
        self.signature = self._signature(batched)
        self.infer: Callable[[Infer], Results] = self._adapter()

    def _signature(self, batched: bool) -> Signature:
        outputs = tuple(TensorSpec(name, c.datatype, c.shape) for name, c in self._results.fields)
        return Signature(
            inputs=tuple(argument.spec for argument in self._arguments if argument.spec is not None),
            outputs=outputs,
            open_inputs=any(argument.role in ("call", "others", "table") for argument in self._arguments),
            open_outputs=not outputs,
            batched=batched,
        )

    def _adapter(self) -> Callable[[Infer], Any]:
        """Return `infer` as the kind of function that the callable is."""
        function, apply, finish = self._function, self._apply, self._results.finish

        def value(call: Infer) -> Result:
            return finish(apply(call, function))

        async def coroutine(call: Infer) -> Result:
            pending: Awaitable[Any] = apply(call, function)
            return finish(await pending)

        def generator(call: Infer) -> Iterator[Result]:
            yield from map(finish, apply(call, function))

        async def async_generator(call: Infer) -> AsyncIterator[Result]:
            async with aclosing(apply(call, function)) as results:
                async for result in results:
                    yield finish(result)

        kinds: Mapping[str, Callable[[Infer], Any]] = {
            "value": value,
            "coroutine": coroutine,
            "generator": generator,
            "async generator": async_generator,
        }
        return kinds[self._kind]

    def _apply(self, call: Infer, function: Callable[..., Any]) -> Any:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for argument in self._arguments:
            match argument.role:
                case "call":
                    named[argument.name] = call
                case "parameters":
                    named[argument.name] = call.parameters
                case "others":
                    named |= decode_inputs(self._rest(call), self._defaults)
                case "table" if self._rest(call) or (argument.required and not argument.nullable):
                    named[argument.name] = argument.table(self._rest(call), self._defaults)
                case "input" if argument.name in call.inputs:
                    default = self._defaults.inputs.get(argument.name, "")
                    named[argument.name] = argument.value(call.inputs[argument.name], default)
                case _ if argument.required:
                    named[argument.name] = None
            if argument.positional_only and argument.name in named:
                positional.append(named.pop(argument.name))
        return function(*positional, **named)

    def _rest(self, call: Infer) -> dict[str, Tensor]:
        """Return the inputs that no parameter names."""
        return {name: tensor for name, tensor in call.inputs.items() if name not in self._names}


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the function's signature; type aliases in its annotations are replaced by their values."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [p.replace(annotation=_resolve_aliases(p.annotation)) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=_resolve_aliases(signature.return_annotation))


def _resolve_aliases(annotation: Any) -> Any:
    """Return the annotation without type aliases, except those that are the type hint of a codec."""
    return without_aliases(annotation, lambda alias: CODECS.custom_input_for_hint(alias) is not None)


# --- results ---------------------------------------------------------------------------------------------


class _Results(msgspec.Struct, frozen=True):
    """How a result becomes outputs.

    fields: name and conversion of each output; empty if the annotation does not give them.
    parts: returns the values of a result, one per field.
    named: outputs are returned by name instead of position.
    content_type: of a result that is the whole response, such as a data frame.
    """

    fields: tuple[tuple[str, Conversion], ...] = ()
    parts: Callable[[Any], tuple[Any, ...]] | None = None
    named: bool = False
    content_type: str = ""

    def finish(self, value: Any) -> Result:
        """Return the outputs of one result. Raises InvalidOutput naming one that does not match its annotation."""
        if self.parts is None:
            return encode_answer(value, self.content_type) if self.content_type else _encode_unannotated(value)
        try:
            parts = self.parts(value)
        except (TypeError, KeyError, AttributeError) as error:
            raise InvalidOutput(f"expected a result as annotated, got {type(value).__name__}: {error!r}") from error
        if len(parts) != len(self.fields):
            raise InvalidOutput(f"expected {len(self.fields)} results, got {len(parts)}")
        tensors = [_tensor(part, name, c) for part, (name, c) in zip(parts, self.fields, strict=True)]
        if not self.named:
            return tuple(tensors)
        return {name: tensor for (name, _), tensor in zip(self.fields, tensors, strict=True)}


def _encode_unannotated(value: Any) -> Result:
    """Return a result without annotation: unchanged if `Model.infer` may return it, else encoded by a codec."""
    if isinstance(value, _SCALARS):
        return np.asarray([value])  # shape [1], as with an annotation
    is_array_like = isinstance(value, list) and (
        not value or isinstance(value[0], (*_SCALARS, list, np.generic, np.ndarray))
    )
    if (
        is_array_like
        or value is None
        or isinstance(value, np.ndarray | np.generic | Tensor | Inference | Mapping | tuple)
    ):
        result: Result = value
        return result
    return encode_answer(value)


def _tensor(value: Any, name: str, conversion: Conversion) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return conversion.to_tensor(value)
    except DragomanError as error:
        raise InvalidOutput(f"output '{name}': {error.message}") from error
    except (TypeError, ValueError) as error:
        raise InvalidOutput(f"output '{name}': expected the annotated type, got {type(value).__name__}") from error


def _results(annotation: Any, where: str) -> _Results:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _ANY_RESULT or annotation is None or _is_mapping(origin or annotation):
        return _Results()
    codec = table_codec(annotation)
    if codec is not None:
        return _Results(content_type=codec.content_type)
    if origin is tuple:
        if Ellipsis in arguments:
            return _Results()
        outputs = tuple((f"output-{i}", conversion_of(each, where)) for i, each in enumerate(arguments))
        return _Results(outputs, tuple)
    if isinstance(annotation, type) and (names := _field_names(annotation)):
        hints = _field_hints(annotation, where)
        outputs = tuple((n, conversion_of(_unwrap(hints[n]), f"field '{n}' of {where}")) for n in names)
        by_key = is_typeddict(annotation)
        return _Results(outputs, lambda v: tuple(v[n] if by_key else getattr(v, n) for n in names), named=True)
    return _Results((("output-0", conversion_of(annotation, where)),), lambda value: (value,))


def _is_mapping(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, abc.Mapping) and not is_typeddict(annotation)


def _field_names(kind: type) -> tuple[str, ...]:
    if is_typeddict(kind):
        return tuple(kind.__annotations__)
    if issubclass(kind, Tensor):
        return ()
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else tuple(getattr(kind, "_fields", ()))


def _field_hints(kind: type, where: str) -> dict[str, Any]:
    """Return the annotations of the fields without type aliases. Raises ModelFailed if one cannot be evaluated."""
    try:
        return {n: _resolve_aliases(hint) for n, hint in get_type_hints(kind, include_extras=True).items()}
    except (NameError, TypeError) as error:
        text = f"the annotations of {kind.__qualname__}, {where}, cannot be evaluated: {error}"
        raise ModelFailed(text) from error


def _unwrap(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) in (NotRequired, Required) else annotation


def _kind(function: Callable[..., Any], annotation: Any) -> tuple[str, Any]:
    """Return the kind of callable and the annotation of one result, which of a stream is that of one item."""
    call = function if inspect.isroutine(function) else type(function).__call__
    origin = get_origin(annotation)
    is_stream = origin in _STREAMS and get_args(annotation)
    item = get_args(annotation)[0] if is_stream else annotation
    if inspect.isasyncgenfunction(call) or inspect.isasyncgenfunction(function):
        return "async generator", item
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(function):
        return "coroutine", annotation
    if inspect.isgeneratorfunction(call) or inspect.isgeneratorfunction(function):
        return "generator", item
    if is_stream:
        return ("async generator" if issubclass(origin, abc.AsyncIterable) else "generator"), item
    return "value", annotation
