"""A graph as a file tells it: nodes, edges, inputs and outputs, read and checked, with nothing loaded yet."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE
from dragoman.core.vectors import Config

Ends = tuple[str, str]  # the name of a node, and the name or number of its input or output; "" is the only one

# What a node may be; each is a key that says which.
KINDS = ("fn", "model", "umbridge", "served", "builtin", "linear")
_TOP = ("name", "threads", "nodes", "edges", "inputs", "outputs", "bind")


@dataclass(frozen=True, slots=True)
class NodeText:
    """A node as it is written. `kind` is one of KINDS (`linear`, beside `fn` and the like, says that it is linear);
    `what` is its value, `options` are its further keys."""

    name: str
    kind: str
    what: Any
    config: Config = NONE
    passes: tuple[str, ...] | None = None
    linear: bool = False
    concurrency: int = 0
    cache: int = 0
    options: Mapping[str, Any] = NONE

    @property
    def label(self) -> str:
        """What a picture says of it."""
        if self.kind in ("builtin", "served"):
            return str(self.what)
        return "linear" if self.kind == "linear" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole graph as it is written; None where nothing is said of its inputs or outputs."""

    name: str = ""
    threads: int = 8
    nodes: tuple[NodeText, ...]
    edges: tuple[tuple[Ends, Ends], ...] = ()
    inputs: Mapping[str, tuple[Ends, ...]] | None = None
    outputs: Mapping[str, Ends] | None = None
    bound: Mapping[Ends, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


def document(given: Any) -> Document:
    """A graph from the tables of a TOML, JSON or YAML file. Raises InvalidInput naming key, expected and got."""
    table = _table(given, "a graph")
    for key in table:
        if key not in _TOP:
            raise InvalidInput(f"there is no key '{key}' in a graph; there are {', '.join(_TOP)}")
    inputs, sizes = _inputs(table.get("inputs"))
    threads = table.get("threads", 8)
    if not isinstance(threads, int) or isinstance(threads, bool) or not 0 <= threads <= 1024:
        raise InvalidInput(f"threads: expected a whole number from 0 to 1024, got {threads!r}")
    name = table.get("name", "")
    if not isinstance(name, str):
        raise InvalidInput(f"name: expected text, got {name!r}")
    return Document(
        name=name,
        threads=threads,
        nodes=tuple(_node(n, t) for n, t in _table(table.get("nodes", {}), "nodes").items()),
        edges=tuple(_edges(table.get("edges", []))),
        inputs=inputs,
        outputs=_outputs(table.get("outputs")),
        bound={_end(port, "bind"): value for port, value in _table(table.get("bind", {}), "bind").items()},
        sizes=sizes,
    )


def _node(name: str, given: Any) -> NodeText:
    where = f"node '{name}'"
    table = dict(_table(given, where))
    is_linear = isinstance(table.get("linear"), bool) and table.pop("linear")
    kinds = [kind for kind in KINDS if kind in table and not (kind == "model" and "umbridge" in table)]
    if len(kinds) != 1:
        got = " and ".join(kinds) or f"{', '.join(table) or 'nothing'}"
        raise InvalidInput(f"{where}: expected one of {', '.join(KINDS)}, got {got}")
    kind = kinds[0]
    what = table.pop(kind)
    passes = table.pop("passes", None)
    if passes is not None and (not isinstance(passes, list) or not all(isinstance(p, str) for p in passes)):
        raise InvalidInput(f"{where}: passes: expected a list of keys of the config, got {passes!r}")
    bounds = {key: _size(table.pop(key, 0), f"{where}: {key}") for key in ("concurrency", "cache")}
    config = _table(table.pop("config", {}), f"{where}: config")
    kept = None if passes is None else tuple(passes)
    return NodeText(name, kind, what, config, kept, is_linear, **bounds, options=table)


def _edges(given: Any) -> Iterator[tuple[Ends, Ends]]:
    """`a.0 -> b.1`, or a chain of several."""
    if not isinstance(given, list):
        raise InvalidInput(f"edges: expected a list of texts as 'a.0 -> b.1', got {given!r}")
    for text in given:
        ends = [_end(end, f"edge {text!r}") for end in text.split("->")] if isinstance(text, str) else []
        if len(ends) < 2:
            raise InvalidInput(f"edges: expected a text as 'a.0 -> b.1', got {text!r}")
        if any(port for _, port in ends[1:-1]):
            raise InvalidInput(
                f"edge {text!r}: in the middle of a chain stand nodes of one input and output, by name alone"
            )
        yield from itertools.pairwise(ends)


def _inputs(given: Any) -> tuple[dict[str, tuple[Ends, ...]] | None, dict[str, int]]:
    """`x = "a.0"`, `x = ["a.0", "b.0"]`, or `x = { to = [...], size = 3 }`."""
    if given is None:
        return None, {}
    found: dict[str, tuple[Ends, ...]] = {}
    sizes: dict[str, int] = {}
    for name, told in _table(given, "inputs").items():
        where = f"inputs: '{name}'"
        ends = told
        if isinstance(told, Mapping):
            if set(told) - {"to", "size"} or "to" not in told:
                raise InvalidInput(f"{where}: expected the keys to and size, got {', '.join(told) or 'none'}")
            ends = told["to"]
            if "size" in told:
                sizes[name] = _size(told["size"], where)
        found[name] = tuple(_end(end, where) for end in ([ends] if isinstance(ends, str) else _list(ends, where)))
    return found, sizes


def _outputs(given: Any) -> dict[str, Ends] | None:
    """A list of ports, or a table of names and ports."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return {name: _end(port, f"outputs: '{name}'") for name, port in given.items()}
    ends = [_end(port, "outputs") for port in _list(given, "outputs")]
    several = {node for i, (node, _) in enumerate(ends) if node in [other for other, _ in ends[:i]]}
    return {f"{node}.{port or 0}" if node in several else node: (node, port) for node, port in ends}


def _end(given: Any, where: str) -> Ends:
    if not isinstance(given, str) or not given.strip():
        raise InvalidInput(f"{where}: expected a node, or a node and its port as 'beam.0', got {given!r}")
    node, _, port = given.strip().partition(".")
    return node, port


def _size(given: Any, where: str) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise InvalidInput(f"{where}: expected a whole number from 0, got {given!r}")
    return given


def _list(given: Any, where: str) -> Sequence[Any]:
    if not isinstance(given, list):
        raise InvalidInput(f"{where}: expected a text or a list of them, got {given!r}")
    return given


def _table(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InvalidInput(f"{where}: expected a table, got {given!r:.100}")
    return given
