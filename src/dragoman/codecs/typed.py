"""A typed Python function as a model: its annotations tell the signature and convert each call."""

import inspect
from collections import abc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NotRequired, Required, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np

from dragoman.codecs.annotations import Shape as Shape
from dragoman.codecs.annotations import conversion
from dragoman.codecs.arguments import arguments, table_codec
from dragoman.codecs.conversion import Conversion
from dragoman.codecs.decode import NO_DEFAULTS, Defaults, decode_inputs, encode_answer
from dragoman.codecs.registry import CODECS
from dragoman.core.calls import Infer, Inference
from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.model import Result, Results
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.core.type_aliases import without_aliases

# Return annotations that tell nothing of the outputs: whatever `Model.infer` may give is taken.
_OPEN: tuple[Any, ...] = (inspect.Signature.empty, Any, Inference, Result, Results, dict, tuple, list)
_STREAMS = (abc.Iterator, abc.Iterable, abc.Generator, abc.AsyncIterator, abc.AsyncIterable, abc.AsyncGenerator)
_SCALARS = (bool, int, float, str, bytes)


class TypedFunction:
    """A callable with annotations, as `signature` and as `infer`, which is of the callable's own kind.

    Each parameter is an input of its name: an array, a float, int, bool, str, bytes, datetime, dict, image, or a list
    of these, a pd.Series, or what a codec of one's own makes; one with a default, or `| None`, may be left out. A
    parameter annotated pd.DataFrame gets every input that no other parameter names, a column each. One annotated
    `Parameters` gets the call's parameters, one annotated `Infer` the whole call, and `**inputs` every further input.
    Inputs that name a content type, or have one in the model's settings (`defaults`), are decoded by it.

    One result is `output-0`; a tuple is `output-0`, `output-1`, ...; a dataclass, NamedTuple or TypedDict names its
    outputs by its fields; a pd.DataFrame by its columns; any other mapping, or no annotation, leaves the outputs open.
    Raises ModelFailed naming a parameter that has no tensor form.
    """

    def __init__(
        self, function: Callable[..., Any], *, batched: bool = False, defaults: Defaults = NO_DEFAULTS
    ) -> None:
        self._function = function
        self._defaults = defaults
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            declared = _declared(function)
        except (NameError, TypeError, ValueError) as fault:
            raise ModelFailed(f"the annotations of {name} cannot be read: {fault}") from fault
        self._arguments = arguments(declared, name)
        self._names = frozenset(argument.name for argument in self._arguments if argument.role == "input")
        self._kind, returned = _kind(function, declared.return_annotation)
        self._results = _results(returned, f"the result of {name}")
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
        """`infer`, as a plain function, coroutine or generator: who runs it looks which it is."""
        function, bound, finish = self._function, self._bound, self._results.finish

        def value(call: Infer) -> Result:
            return finish(bound(call, function))

        async def coroutine(call: Infer) -> Result:
            pending: Awaitable[Any] = bound(call, function)
            return finish(await pending)

        def generator(call: Infer) -> Iterator[Result]:
            yield from map(finish, bound(call, function))

        async def async_generator(call: Infer) -> AsyncIterator[Result]:
            async with aclosing(bound(call, function)) as pieces:
                async for piece in pieces:
                    yield finish(piece)

        kinds: Mapping[str, Callable[[Infer], Any]] = {
            "value": value,
            "coroutine": coroutine,
            "generator": generator,
            "async generator": async_generator,
        }
        return kinds[self._kind]

    def _bound(self, call: Infer, function: Callable[..., Any]) -> Any:
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
        """The inputs that no parameter names."""
        return {name: tensor for name, tensor in call.inputs.items() if name not in self._names}


def _declared(function: Callable[..., Any]) -> inspect.Signature:
    """Return the function's signature; type aliases in its annotations are replaced by their values."""
    found = inspect.signature(function, eval_str=True)
    parameters = [p.replace(annotation=_plain(p.annotation)) for p in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=_plain(found.return_annotation))


def _plain(annotation: Any) -> Any:
    """Return the annotation without type aliases, except those that are the type hint of a codec."""
    return without_aliases(annotation, lambda alias: CODECS.own_input(alias) is not None)


# --- results ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Results:
    """How a result becomes outputs: `fields` in order (none: open), by position, attribute or key.

    `content_type`: a whole answer is made of it, such as a data frame.
    """

    fields: tuple[tuple[str, Conversion], ...] = ()
    parts: Callable[[Any], tuple[Any, ...]] | None = None
    named: bool = False
    content_type: str = ""

    def finish(self, value: Any) -> Result:
        """The outputs of one result; InvalidOutput naming the output that does not fit its annotation."""
        if self.parts is None:
            return encode_answer(value, self.content_type) if self.content_type else _open(value)
        try:
            parts = self.parts(value)
        except (TypeError, KeyError, AttributeError) as fault:
            raise InvalidOutput(f"expected a result as annotated, got {type(value).__name__}: {fault!r}") from fault
        if len(parts) != len(self.fields):
            raise InvalidOutput(f"expected {len(self.fields)} results, got {len(parts)}")
        tensors = [_tensor(part, name, c) for part, (name, c) in zip(parts, self.fields, strict=True)]
        if not self.named:
            return tuple(tensors)
        return {name: tensor for (name, _), tensor in zip(self.fields, tensors, strict=True)}


def _open(value: Any) -> Result:
    """A result that no annotation tells of: what `Model.infer` may give, or else what a codec takes."""
    if isinstance(value, _SCALARS):
        return np.asarray([value])  # told as shape [1], as an annotated one is
    simple = isinstance(value, list) and (not value or isinstance(value[0], (*_SCALARS, list, np.generic, np.ndarray)))
    if simple or value is None or isinstance(value, np.ndarray | np.generic | Tensor | Inference | Mapping | tuple):
        result: Result = value
        return result
    return encode_answer(value)


def _tensor(value: Any, name: str, by: Conversion) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return by.to_tensor(value)
    except DragomanError as fault:
        raise InvalidOutput(f"output '{name}': {fault.message}") from fault
    except (TypeError, ValueError) as fault:
        raise InvalidOutput(f"output '{name}': expected what is annotated, got {type(value).__name__}") from fault


def _results(annotation: Any, where: str) -> _Results:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _OPEN or annotation is None or _is_mapping(origin or annotation):
        return _Results()
    whole = table_codec(annotation)
    if whole is not None:
        return _Results(content_type=whole.content_type)
    if origin is tuple:
        if Ellipsis in arguments:
            return _Results()
        found = tuple((f"output-{i}", conversion(each, where)) for i, each in enumerate(arguments))
        return _Results(found, tuple)
    if isinstance(annotation, type) and (names := _field_names(annotation)):
        hints = _field_hints(annotation, where)
        found = tuple((n, conversion(_unwrapped(hints[n]), f"field '{n}' of {where}")) for n in names)
        by_key = is_typeddict(annotation)
        return _Results(found, lambda v: tuple(v[n] if by_key else getattr(v, n) for n in names), named=True)
    return _Results((("output-0", conversion(annotation, where)),), lambda value: (value,))


def _is_mapping(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, abc.Mapping) and not is_typeddict(annotation)


def _field_names(kind: type) -> tuple[str, ...]:
    if is_typeddict(kind):
        return tuple(kind.__annotations__)
    if issubclass(kind, Tensor):
        return ()
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else tuple(getattr(kind, "_fields", ()))


def _field_hints(kind: type, where: str) -> dict[str, Any]:
    """Return the annotations of the fields without type aliases; ModelFailed if one cannot be evaluated."""
    try:
        return {n: _plain(hint) for n, hint in get_type_hints(kind, include_extras=True).items()}
    except (NameError, TypeError) as fault:
        raise ModelFailed(f"the annotations of {kind.__qualname__}, {where}, cannot be read: {fault}") from fault


def _unwrapped(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) in (NotRequired, Required) else annotation


def _kind(function: Callable[..., Any], annotation: Any) -> tuple[str, Any]:
    """What the callable is, and the annotation of one answer: that of one piece, where it gives a stream."""
    call = function if inspect.isroutine(function) else type(function).__call__
    origin = get_origin(annotation)
    streamed = origin in _STREAMS and get_args(annotation)
    piece = get_args(annotation)[0] if streamed else annotation
    if inspect.isasyncgenfunction(call) or inspect.isasyncgenfunction(function):
        return "async generator", piece
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(function):
        return "coroutine", annotation
    if inspect.isgeneratorfunction(call) or inspect.isgeneratorfunction(function):
        return "generator", piece
    if streamed:
        return ("async generator" if issubclass(origin, abc.AsyncIterable) else "generator"), piece
    return "value", annotation
