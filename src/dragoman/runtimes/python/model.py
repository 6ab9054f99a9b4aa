"""Models in Python: a `Model` subclass, a function marked by `@model`, or any typed callable."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar, overload

from dragoman import plugins
from dragoman.codecs.decode import Defaults
from dragoman.codecs.typed import TypedFunction
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec, Placement
from dragoman.runtimes.vector_model import WaitingModel, is_any_vector_function, vector_model

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__dragoman__"


@dataclass(frozen=True, slots=True)
class ModelDeclaration:
    """What `@model` says of a function; see `Model` for the meaning of each."""

    name: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batched: bool = False
    placement: Placement = ""
    platform: str = ""


@overload
def model(function: F) -> F: ...
@overload
def model(
    *,
    name: str = "",
    inputs: Iterable[TensorSpec] = (),
    outputs: Iterable[TensorSpec] = (),
    batched: bool = False,
    placement: Placement = "",
    platform: str = "",
) -> Callable[[F], F]: ...
def model(function: Any = None, **options: Any) -> Any:
    """Mark a function as a model: `@model`, or `@model(batched=True, ...)`. It stays the function it was.

    name: what clients call it, unless the operator says otherwise; the function's own name by default.
    inputs, outputs: its tensors, instead of what its annotations tell.
    batched: the first axis of every array counts independent rows, so that calls may be merged.
    placement: "inline", "thread" or "process"; by default "process", or "thread" for an object passed to `serve`.
    platform: what metadata says of the framework; "python" by default.
    """
    options |= {key: tuple(options[key]) for key in ("inputs", "outputs") if key in options}
    declared = ModelDeclaration(**options)

    def mark(marked: Any) -> Any:
        named = replace(declared, name=declared.name or getattr(marked, "__name__", ""))
        setattr(marked, _MARK, named)
        return marked

    return mark if function is None else mark(function)


def declared_by(target: Any) -> ModelDeclaration | None:
    """What `@model` said of an object; None where it was not marked."""
    found = getattr(target, "__dict__", {}).get(_MARK)
    return found if isinstance(found, ModelDeclaration) else None


def load(spec: ModelSpec) -> Model:
    """The model that `spec.target` is, or that lies at `spec.uri`.

    The uri is `module:attribute`, `file.py:attribute`, or a file or folder with one model in it. Raises
    ModelFailed where there is none, or several.
    """
    return as_model(_target(spec) if spec.target is None else spec.target, spec)


def as_model(target: Any, spec: ModelSpec) -> Model:
    """A Model subclass, a Model, a function of vectors or a callable, as a Model with this spec."""
    if is_any_vector_function(target):
        made = vector_model(target, spec)
        calls = made.function.concurrency
        return made if calls == 1 else WaitingModel(spec, made.function, calls, made.placement)
    if isinstance(target, type):
        if not issubclass(target, Model):
            raise ModelFailed(f"class {target.__name__} is no model; expected a subclass of dragoman.Model")
        return _derived(_made(target, spec), spec)
    if isinstance(target, Model):
        return _derived(target, spec)
    if callable(target):
        return FunctionModel(spec, target, declared_by(target) or ModelDeclaration())
    raise ModelFailed(
        f"{type(target).__name__} is no model; expected a subclass of dragoman.Model, an instance of one or a function"
    )


class FunctionModel(Model):
    """A typed function as a model; what `@model` declared goes before what its annotations tell."""

    def __init__(self, spec: ModelSpec, function: Callable[..., Any], declared: ModelDeclaration) -> None:
        super().__init__(spec)
        self.platform = declared.platform or type(self).platform
        self.placement = declared.placement
        typed = TypedFunction(function, batched=declared.batched, defaults=Defaults.of(spec, declared.inputs))
        _adopt(self, typed, declared.inputs, declared.outputs)


def _derived(made: Model, spec: ModelSpec) -> Model:
    """The instance, with its spec, and with `infer` from the annotations of `predict` where only that is written."""
    if getattr(made, "spec", None) is None:
        made.spec = spec
    predict = getattr(made, "predict", None)
    if type(made).infer is Model.infer and "infer" not in vars(made) and callable(predict):
        typed = TypedFunction(predict, batched=made.batched, defaults=Defaults.of(spec, made.inputs))
        _adopt(made, typed, made.inputs, made.outputs)
    return made


def _adopt(made: Model, typed: TypedFunction, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Give a model the typed function's `infer`, and its signature where it has none of its own."""
    signature = typed.signature
    if inputs:
        signature = replace(signature, inputs=inputs, open_inputs=False)
    if outputs:
        signature = replace(signature, outputs=outputs, open_outputs=False)
    single = [s.name for s in signature.inputs if s.shape == (1,) and not inputs]
    if signature.batched and single:
        raise ModelFailed(f"a batched model takes arrays of rows, but input '{single[0]}' is a single value")
    # `infer` must be the function itself, not a method around it: its kind tells how it is run.
    made.infer = typed.infer  # type: ignore[method-assign, assignment]
    if type(made).signature is Model.signature:
        made.signature = lambda: signature  # type: ignore[method-assign]


def _made(kind: type[Model], spec: ModelSpec) -> Model:
    """An instance, given the spec unless its own `__init__` asks for none."""
    make: Callable[..., Model] = kind
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.kind in named]
    takes_spec = parameters and (parameters[0].name == "spec" or parameters[0].default is inspect.Parameter.empty)
    return make(spec) if takes_spec else make()


# --- where it lies ---------------------------------------------------------------------------------------


def _target(spec: ModelSpec) -> Any:
    path = Path(spec.uri) / "model.py" if Path(spec.uri).is_dir() else Path(spec.uri)
    if path.suffix == ".py":
        return _only_model(_imported(path), path)
    if ":" in spec.uri:
        return plugins.resolve(spec.uri)
    raise ModelFailed(f"'{spec.uri}' is no Python model; expected file.py, file.py:attribute or module:attribute")


def _imported(path: Path) -> ModuleType:
    try:
        return plugins.import_file(path)
    except (ImportError, OSError, SyntaxError) as error:
        raise ModelFailed(f"cannot import '{path.name}': {type(error).__name__}: {error}") from error


def candidates(module: ModuleType) -> dict[str, Any]:
    """The models that a file holds, by the names of the variables: each object once, no class beside its instance."""
    found = {name: value for name, value in vars(module).items() if _is_candidate(name, value, module)}
    made = {type(value) for value in found.values()}
    once = {id(value): name for name, value in reversed(found.items())}
    return {n: v for n, v in found.items() if once[id(v)] == n and not (isinstance(v, type) and v in made)}


def _only_model(module: ModuleType, path: Path) -> Any:
    found = candidates(module)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise ModelFailed(f"'{path.name}' holds no model; expected one subclass of dragoman.Model or @dragoman.model")
    raise ModelFailed(
        f"'{path.name}' holds several models: {', '.join(found)}; name one, as in '{path.name}:{next(iter(found))}'"
    )


def _is_candidate(name: str, value: Any, module: ModuleType) -> bool:
    """A public Model subclass or marked object that this file itself defines, or a function of vectors made here."""
    if name.startswith("_"):
        return False
    if is_any_vector_function(value) and not isinstance(value, type | FunctionType):
        return True
    if getattr(value, "__module__", None) != module.__name__:
        return False
    if is_any_vector_function(value):
        return True
    return declared_by(value) is not None or (isinstance(value, type) and issubclass(value, Model))
