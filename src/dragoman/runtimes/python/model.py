"""Models in Python: a `Model` subclass, a function marked by `@model`, or any typed callable."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar, overload

import msgspec
from msgspec import structs

from dragoman import hooks, plugins
from dragoman.codecs.decode import Defaults
from dragoman.codecs.typed import TypedFunction
from dragoman.core.about import first_sentence
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import PythonObjects
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec, Placement

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__dragoman__"


class ModelDeclaration(msgspec.Struct, frozen=True):
    """The arguments of `@model`; see `Model`."""

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
    """Mark a function as a model: `@model`, or `@model(batched=True, ...)`. Return the same function.

    name: the name of the model, unless the operator configures another; by default that of the function.
    inputs, outputs: its tensors, instead of those of its annotations.
    batched: the first axis of every array counts independent rows, so that calls may be merged.
    placement: "inline", "thread" or "process"; by default "process", or "thread" for an object passed to `serve`.
    platform: the framework, for metadata; "python_function" by default.
    """
    options |= {key: tuple(options[key]) for key in ("inputs", "outputs") if key in options}
    declared = ModelDeclaration(**options)

    def mark(function: Any) -> Any:
        setattr(function, _MARK, structs.replace(declared, name=declared.name or getattr(function, "__name__", "")))
        return function

    return mark if function is None else mark(function)


def declaration_of(target: Any) -> ModelDeclaration | None:
    """Return the declaration of an object that `@model` has marked, else None."""
    declaration = getattr(target, "__dict__", {}).get(_MARK)
    return declaration if isinstance(declaration, ModelDeclaration) else None


def load(spec: ModelSpec) -> Model:
    """Return the model of `spec.target`, or the one at `spec.uri`.

    The uri is `module:attribute`, `file.py:attribute`, or a file or folder with one model. Raises ModelFailed if there
    is none, or several.
    """
    if spec.target is not None:
        return as_model(spec.target, spec)
    model, file = as_model(_target(spec), spec), _file(spec)
    if not model.description and file is not None:
        model.description = first_sentence(_import(file).__doc__)
    return model


def as_model(target: Any, spec: ModelSpec) -> Model:
    """Return a Model with this spec for a Model subclass, a Model, a callable, or an object of a feature's kind.

    Its description is its own, else the first sentence of the docstring of the function or class; that of the file is
    used where it holds one model.
    """
    model = _as_model(target, spec)
    if not model.description:
        model.description = first_sentence(_docstring(target))
    return model


def _docstring(target: Any) -> str:
    """Return the docstring of a function, a class, or the class of an object; "" where Python has made it."""
    documented = inspect.unwrap(target) if callable(target) else target
    if not isinstance(documented, type | FunctionType):
        documented = type(documented)
    if documented.__module__ in ("builtins", "functools"):
        return ""
    text = documented.__doc__ or ""
    return "" if text.startswith(f"{documented.__name__}(") else text  # of a dataclass


def _as_model(target: Any, spec: ModelSpec) -> Model:
    if (kind := _kind_of(target)) is not None:
        return kind.load(target, spec)
    if isinstance(target, type):
        if not issubclass(target, Model):
            raise ModelFailed(f"class {target.__name__} is not a model: expected a subclass of dragoman.Model")
        return _with_predict(_instantiate(target, spec), spec)
    if isinstance(target, Model):
        return _with_predict(target, spec)
    if callable(target):
        return FunctionModel(spec, target, declaration_of(target) or ModelDeclaration())
    raise ModelFailed(
        f"{type(target).__name__} is not a model: expected a subclass or instance of dragoman.Model, or a function"
    )


class FunctionModel(Model):
    """A typed function as a model; declarations of `@model` override its annotations."""

    def __init__(self, spec: ModelSpec, function: Callable[..., Any], declared: ModelDeclaration) -> None:
        super().__init__(spec)
        self.platform = declared.platform or type(self).platform
        self.placement = declared.placement
        typed = TypedFunction(function, batched=declared.batched, defaults=Defaults.of(spec, declared.inputs))
        _adopt(self, typed, declared.inputs, declared.outputs)


def _with_predict(model: Model, spec: ModelSpec) -> Model:
    """Return the model with its spec, and with `infer` by the annotations of `predict` if it has no own one."""
    if getattr(model, "spec", None) is None:
        model.spec = spec
    predict = getattr(model, "predict", None)
    if type(model).infer is Model.infer and "infer" not in vars(model) and callable(predict):
        typed = TypedFunction(predict, batched=model.batched, defaults=Defaults.of(spec, model.inputs))
        _adopt(model, typed, model.inputs, model.outputs)
    return model


def _adopt(model: Model, typed: TypedFunction, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Set `infer` of a model to that of a typed function, and its signature unless it has its own."""
    signature = typed.signature
    if inputs:
        signature = replace(signature, inputs=inputs, open_inputs=False)
    if outputs:
        signature = replace(signature, outputs=outputs, open_outputs=False)
    single = [s.name for s in signature.inputs if s.shape == (1,) and not inputs]
    if signature.batched and single:
        raise ModelFailed(f"a batched model takes arrays of rows, but input '{single[0]}' is a single value")
    # The function itself, not a wrapper: whether it is `async` or a generator decides how it is run.
    model.infer = typed.infer  # type: ignore[method-assign, assignment]
    if type(model).signature is Model.signature:
        model.signature = lambda: signature  # type: ignore[method-assign]


def _instantiate(kind: type[Model], spec: ModelSpec) -> Model:
    """Return an instance; the spec is passed if `__init__` takes it."""
    make: Callable[..., Model] = kind
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.kind in named]
    takes_spec = parameters and (parameters[0].name == "spec" or parameters[0].default is inspect.Parameter.empty)
    return make(spec) if takes_spec else make()


# --- files -----------------------------------------------------------------------------------------------


def _file(spec: ModelSpec) -> Path | None:
    """Return the file whose only model this is, None if the uri names an object."""
    path = Path(spec.uri) / "model.py" if Path(spec.uri).is_dir() else Path(spec.uri)
    return path if path.suffix == ".py" else None


def _target(spec: ModelSpec) -> Any:
    if (file := _file(spec)) is not None:
        return _only_model(_import(file), file)
    if ":" in spec.uri:
        return plugins.resolve(spec.uri)
    raise ModelFailed(f"'{spec.uri}' is not a Python model: expected file.py, file.py:attribute or module:attribute")


def _import(path: Path) -> ModuleType:
    try:
        return plugins.import_file(path)
    except (ImportError, OSError, SyntaxError) as error:
        raise ModelFailed(f"cannot import '{path.name}': {type(error).__name__}: {error}") from error


def candidates(module: ModuleType) -> dict[str, Any]:
    """Return the models of a file by variable: each object once, and no class beside its instance."""
    members = {name: value for name, value in vars(module).items() if _is_candidate(name, value, module)}
    instantiated = {type(value) for value in members.values()}
    once = {id(value): name for name, value in reversed(members.items())}
    return {n: v for n, v in members.items() if once[id(v)] == n and not (isinstance(v, type) and v in instantiated)}


def _suggest_attribute(module: ModuleType, path: Path) -> str:
    """Return a suggestion of the function or class that is meant: the one named as the file, else the last one."""
    own = [n for n, v in vars(module).items() if callable(v) and v.__module__ == module.__name__ and n[:1] != "_"]
    name = path.stem if path.stem in own else own[-1] if own else ""
    return f"; did you mean '{path.name}:{name}'?" if name else ""


def _only_model(module: ModuleType, path: Path) -> Any:
    models = candidates(module)
    if len(models) == 1:
        return next(iter(models.values()))
    if not models:
        hint = _suggest_attribute(module, path)
        raise ModelFailed(
            f"'{path.name}' has no model: expected one subclass of dragoman.Model or @dragoman.model{hint}"
        )
    raise ModelFailed(
        f"'{path.name}' has several models, {', '.join(models)}: name one, as in '{path.name}:{next(iter(models))}'"
    )


def _is_candidate(name: str, value: Any, module: ModuleType) -> bool:
    """Return whether a variable is a public model of this file: a Model subclass, marked, or of a feature's kind."""
    if name.startswith("_"):
        return False
    is_of_kind = _kind_of(value) is not None
    if is_of_kind and not isinstance(value, type | FunctionType):
        return True
    if getattr(value, "__module__", None) != module.__name__:
        return False
    return is_of_kind or declaration_of(value) is not None or (isinstance(value, type) and issubclass(value, Model))


# --- objects of features ---------------------------------------------------------------------------------


def _kind_of(target: Any) -> PythonObjects | None:
    kinds: Iterable[PythonObjects] = hooks.all_of("python_objects").values()
    return next((kind for kind in kinds if kind.accept(target)), None)


def model_names(file: str, attribute: str = "") -> dict[str, Any]:
    """Describe the models of features' kinds, such as functions of vectors, in a Python file, or its `attribute`.

    served: the attributes of the models that serving the file serves, by the models' own names; empty where the file
        also holds other models, where two models have one name, where it holds one function, which is named as the
        file, or where the loader will reject the file.
    instances: the own name of each model that is a module's attribute.
    classes: the attributes that are classes whose own name shows in an instance only.
    """
    if attribute:
        return {
            "served": _by_own_name({attribute: plugins.resolve(f"{file}:{attribute}")}),
            "instances": {},
            "classes": [],
        }
    module = plugins.import_file(Path(file))
    models = {name: value for name, value in vars(module).items() if _names_itself(value)}
    instances = {name: _own_name(value) for name, value in models.items() if not isinstance(value, type)}
    return {
        "served": _by_own_name(candidates(module)),
        "instances": {name: own for name, own in instances.items() if own},
        "classes": [name for name, value in models.items() if isinstance(value, type)],
    }


def _by_own_name(models: Mapping[str, Any]) -> dict[str, str]:
    """Return the attributes of models by the models' own names; empty unless each has a unique one."""
    if None in map(_kind_of, models.values()) or (len(models) == 1 and not any(map(_names_itself, models.values()))):
        return {}
    if len(models) > 1 and any(isinstance(target, type) for target in models.values()):
        return {}
    attributes = {
        _own_name(target) if _names_itself(target) else attribute: attribute for attribute, target in models.items()
    }
    return {} if "" in attributes or len(attributes) < len(models) else attributes


def _names_itself(target: Any) -> bool:
    kind = _kind_of(target)
    return kind is not None and kind.names_itself(target)


def _own_name(target: Any) -> str:
    kind = _kind_of(target)
    return "" if kind is None else kind.own_name(target)
