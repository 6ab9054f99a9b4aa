"""The nodes that a graph's file names become functions of vectors: in Python, of a server, built in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from dragoman import plugins
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.sibling_models import SiblingModels
from dragoman.core.spec import ModelSpec
from dragoman.core.vectors import Config, VectorFunction
from dragoman.derivatives.decorator import LazyVectorFunction, build_vector_function, is_vector_function
from dragoman.derivatives.selection import METHODS
from dragoman.derivatives.user_function import FunctionOptions
from dragoman.graphs.builtin import built_in
from dragoman.graphs.document import NodeEntry
from dragoman.graphs.graph import make_node
from dragoman.graphs.wiring import Node
from dragoman.runtimes.graph.files import read_array
from dragoman.runtimes.graph.siblings import SiblingFunction
from dragoman.runtimes.vector_model import VectorModel

# Options of a Python function in a graph file; the same as of `@vector_function`.
_FUNCTION_OPTIONS = ("inputs", "outputs", "at", "derivatives", "vectorised")


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The folder of a graph file, and the other models of the server, if there is one."""

    folder: Path
    siblings: SiblingModels | None = None


def load_node(entry: NodeEntry, context: NodeContext) -> Node:
    """Load a node. Raises a DragomanError that names it."""
    try:
        function = _LOADERS[entry.kind](entry, context)
    except DragomanError as error:
        raise type(error)(f"node '{entry.name}': {error.message}") from error
    return make_node(
        entry.name,
        function,
        config=entry.config,
        passes=entry.passes,
        linear=entry.linear,
        concurrency=entry.concurrency,
        cache=entry.cache,
        label=entry.label,
    )


def _python(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    """Load `file.py:name` relative to the graph file, or `module:name`."""
    path = _source(entry)
    if ":" not in path:
        raise InvalidInput(f"{entry.kind}: expected 'file.py:name' or 'module:name', got '{path}'")
    file, _, name = path.rpartition(":")
    target = plugins.resolve(f"{context.folder / file}:{name}" if file.endswith(".py") else path)
    options = dict(_options(entry, _FUNCTION_OPTIONS))
    if options.get("derivatives", "auto") not in METHODS:
        if options["derivatives"] != "none":
            known = ", ".join((*METHODS, "none"))
            raise InvalidInput(f"derivatives: expected one of {known}, got {options['derivatives']!r}")
        options["derivatives"] = None
    if not is_vector_function(target) and callable(target) and not isinstance(target, type):
        return LazyVectorFunction(target, FunctionOptions(**options)).build()
    if options and isinstance(lazy := getattr(target, "__vector_function__", None), LazyVectorFunction):
        return LazyVectorFunction(lazy.function, replace(lazy.options, **options)).build()
    if options:
        raise InvalidInput(f"'{path}' declares its own abilities: expected no options, got {', '.join(options)}")
    if is_vector_function(target):
        return build_vector_function(target)
    model = plugins.runtime("python").load(ModelSpec(name=entry.name, runtime="python", target=target))
    if not isinstance(model, VectorModel):
        raise InvalidInput(f"'{path}' is not a vector function; serve it as a model and refer to it with `served`")
    return model.function


def _remote(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    """Connect to a UM-Bridge server, or to several with the same model; options are those of the runtime `umbridge`."""
    parameters = {"urls": entry.source, **entry.options}
    spec = ModelSpec(name=entry.name, runtime="umbridge", parameters=parameters)
    model = plugins.runtime("umbridge").load(spec)
    assert isinstance(model, VectorModel)
    function: Any = model.function
    try:
        function.connect()
    except BaseException:
        function.close()
        raise
    return cast("VectorFunction", function)


def _built_in(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    return built_in(_source(entry), {k: read_array(context.folder, v, k) for k, v in entry.options.items()})


def _linear(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    options = {"matrix": entry.source, **_options(entry, ("shift",))}
    return built_in("linear", {k: read_array(context.folder, v, k) for k, v in options.items()})


def _served(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    """Use another model of the same server."""
    _options(entry, ())
    if context.siblings is None:
        raise InvalidInput(
            f"served: '{_source(entry)}' is available only in the server's process; run the graph there, or draw it "
            "with its models (dragoman graph FILE --with PATH)"
        )
    return SiblingFunction(_source(entry), context.siblings)


_LOADERS: Mapping[str, Callable[[NodeEntry, NodeContext], VectorFunction]] = {
    "fn": _python,
    "model": _python,
    "umbridge": _remote,
    "builtin": _built_in,
    "linear": _linear,
    "served": _served,
}


def _source(entry: NodeEntry) -> str:
    if not isinstance(entry.source, str) or not entry.source:
        raise InvalidInput(f"{entry.kind}: expected a string, got {entry.source!r}")
    return entry.source


def _options(entry: NodeEntry, known: tuple[str, ...]) -> Config:
    for option in entry.options:
        if option not in known:
            raise InvalidInput(
                f"unknown option '{option}' of a '{entry.kind}' node: expected {', '.join(known) or 'none'}"
            )
    return entry.options
