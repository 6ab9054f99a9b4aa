"""The nodes that a graph's file names become functions of vectors: in Python, of a server, built in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.sibling_models import SiblingModels
from dragoman.core.spec import ModelSpec
from dragoman.core.vectors import Config, VectorFunction
from dragoman.derivatives.decorator import LazyVectorFunction, build_vector_function, is_vector_function
from dragoman.derivatives.selection import METHODS
from dragoman.derivatives.user_function import FunctionOptions
from dragoman.graphs.builtin import built_in
from dragoman.graphs.document import NodeText
from dragoman.graphs.graph import made_node
from dragoman.graphs.wiring import Node
from dragoman.runtimes.graph.files import array
from dragoman.runtimes.graph.siblings import Served
from dragoman.runtimes.vector_model import VectorModel

# What a node in Python may say of its function, as `@vector_function` does.
_DECLARED = ("inputs", "outputs", "at", "derivatives", "vectorised")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a graph's nodes are looked for: the folder of its file, and the server's other models, if there is one."""

    folder: Path
    siblings: SiblingModels | None = None


def load_node(text: NodeText, place: Place) -> Node:
    """The node, ready to be asked. Raises a DragomanError that names it."""
    try:
        function = _MAKERS[text.kind](text, place)
    except DragomanError as fault:
        raise type(fault)(f"node '{text.name}': {fault.message}") from fault
    return made_node(
        text.name,
        function,
        config=text.config,
        passes=text.passes,
        linear=text.linear,
        concurrency=text.concurrency,
        cache=text.cache,
        label=text.label,
    )


def _python(text: NodeText, place: Place) -> VectorFunction:
    """`file.py:name` beside the graph's file, or `module:name`."""
    path = _text(text)
    if ":" not in path:
        raise InvalidInput(f"{text.kind}: expected 'file.py:name' or 'module:name', got '{path}'")
    file, _, name = path.rpartition(":")
    target = plugins.resolve(f"{place.folder / file}:{name}" if file.endswith(".py") else path)
    options = dict(_options(text, _DECLARED))
    if options.get("derivatives", "auto") not in METHODS:
        if options["derivatives"] != "none":
            known = ", ".join((*METHODS, "none"))
            raise InvalidInput(f"derivatives: expected one of {known}, got {options['derivatives']!r}")
        options["derivatives"] = None
    if not is_vector_function(target) and callable(target) and not isinstance(target, type):
        return LazyVectorFunction(target, FunctionOptions(**options)).build()
    if options and isinstance(found := getattr(target, "__vector_function__", None), LazyVectorFunction):
        return LazyVectorFunction(found.function, replace(found.options, **options)).build()
    if options:
        raise InvalidInput(f"'{path}' says itself what it can do; expected no {', '.join(options)}")
    if is_vector_function(target):
        return build_vector_function(target)
    made = plugins.runtime("python").load(ModelSpec(name=text.name, runtime="python", target=target))
    if not isinstance(made, VectorModel):
        raise InvalidInput(f"'{path}' is no function of vectors; serve it as a model and name it by `served`")
    return made.function


def _remote(text: NodeText, place: Place) -> VectorFunction:
    """A UM-Bridge server, or several that hold the same model; the further keys are those of `runtime: umbridge`."""
    parameters = {"urls": text.what, **text.options}
    spec = ModelSpec(name=text.name, runtime="umbridge", parameters=parameters)
    model = plugins.runtime("umbridge").load(spec)
    assert isinstance(model, VectorModel)
    found: Any = model.function
    try:
        found.connect()
    except BaseException:
        found.close()
        raise
    function: VectorFunction = found
    return function


def _built_in(text: NodeText, place: Place) -> VectorFunction:
    return built_in(_text(text), {k: array(place.folder, v, k) for k, v in text.options.items()})


def _linear(text: NodeText, place: Place) -> VectorFunction:
    given = {"matrix": text.what, **_options(text, ("shift",))}
    return built_in("linear", {k: array(place.folder, v, k) for k, v in given.items()})


def _served(text: NodeText, place: Place) -> VectorFunction:
    """Another model of the same server."""
    _options(text, ())
    if place.siblings is None:
        raise InvalidInput(
            f"served: '{_text(text)}' can be asked in the server's process alone; expected the graph there, not in a "
            "process of its own, nor drawn without the models that it names (dragoman graph FILE --with PATH)"
        )
    return Served(_text(text), place.siblings)


_MAKERS: Mapping[str, Callable[[NodeText, Place], VectorFunction]] = {
    "fn": _python,
    "model": _python,
    "umbridge": _remote,
    "builtin": _built_in,
    "linear": _linear,
    "served": _served,
}


def _text(text: NodeText) -> str:
    if not isinstance(text.what, str) or not text.what:
        raise InvalidInput(f"{text.kind}: expected text, got {text.what!r}")
    return text.what


def _options(text: NodeText, known: tuple[str, ...]) -> Config:
    for option in text.options:
        if option not in known:
            raise InvalidInput(f"there is no option '{option}' beside '{text.kind}'; there are {', '.join(known)}")
    return text.options
