"""Parse and validate the tables of a graph file; nodes are not loaded."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE
from dragoman.core.vectors import Config

PortName = tuple[str, str]  # node, and name or number of its input or output; "" for the only one

# The kinds of nodes; each is the key that holds what to load.
KINDS = ("fn", "model", "umbridge", "served", "builtin", "linear")
_KEYS = ("name", "threads", "nodes", "edges", "inputs", "outputs", "bind")


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """A node of a graph file. `source` is the value of the key `kind`; `linear` declares another kind as linear."""

    name: str
    kind: str
    source: Any
    config: Config = NONE
    passes: tuple[str, ...] | None = None
    linear: bool = False
    concurrency: int = 0
    cache: int = 0
    options: Mapping[str, Any] = NONE

    @property
    def label(self) -> str:
        return str(self.source) if self.kind in ("builtin", "served") else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDocument:
    """A graph file. `inputs` and `outputs` are None if the file does not declare them."""

    name: str = ""
    threads: int = 8
    nodes: tuple[NodeEntry, ...]
    edges: tuple[tuple[PortName, PortName], ...] = ()
    inputs: Mapping[str, tuple[PortName, ...]] | None = None
    outputs: Mapping[str, PortName] | None = None
    bound: Mapping[PortName, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


def parse_document(value: Any) -> GraphDocument:
    """Parse the content of a TOML, JSON or YAML file. Raises InvalidInput naming the key, what was expected, and what
    it is."""
    table = _table(value, "a graph")
    for key in table:
        if key not in _KEYS:
            raise InvalidInput(f"unknown key '{key}' in a graph: expected one of {', '.join(_KEYS)}")
    inputs, sizes = _parse_inputs(table.get("inputs"))
    threads = table.get("threads", 8)
    if not isinstance(threads, int) or isinstance(threads, bool) or not 0 <= threads <= 1024:
        raise InvalidInput(f"threads: expected an integer from 0 to 1024, got {threads!r}")
    name = table.get("name", "")
    if not isinstance(name, str):
        raise InvalidInput(f"name: expected a string, got {name!r}")
    return GraphDocument(
        name=name,
        threads=threads,
        nodes=tuple(_parse_node(n, t) for n, t in _table(table.get("nodes", {}), "nodes").items()),
        edges=tuple(_parse_edges(table.get("edges", []))),
        inputs=inputs,
        outputs=_parse_outputs(table.get("outputs")),
        bound={_parse_port(port, "bind"): v for port, v in _table(table.get("bind", {}), "bind").items()},
        sizes=sizes,
    )


def _parse_node(name: str, value: Any) -> NodeEntry:
    where = f"node '{name}'"
    table = dict(_table(value, where))
    linear = isinstance(table.get("linear"), bool) and table.pop("linear")
    kinds = [kind for kind in KINDS if kind in table and not (kind == "model" and "umbridge" in table)]
    if len(kinds) != 1:
        got = " and ".join(kinds) or f"{', '.join(table) or 'nothing'}"
        raise InvalidInput(f"{where}: expected one of {', '.join(KINDS)}, got {got}")
    source = table.pop(kinds[0])
    passes = table.pop("passes", None)
    if passes is not None and (not isinstance(passes, list) or not all(isinstance(key, str) for key in passes)):
        raise InvalidInput(f"{where}: passes: expected a list of keys of the config, got {passes!r}")
    limits = {key: _size(table.pop(key, 0), f"{where}: {key}") for key in ("concurrency", "cache")}
    config = _table(table.pop("config", {}), f"{where}: config")
    passed = None if passes is None else tuple(passes)
    return NodeEntry(name, kinds[0], source, config, passed, linear, **limits, options=table)


def _parse_edges(value: Any) -> Iterator[tuple[PortName, PortName]]:
    """Yield the edges of `a.0 -> b.1` and of chains such as `a -> b -> c`."""
    if not isinstance(value, list):
        raise InvalidInput(f"edges: expected a list of strings such as 'a.0 -> b.1', got {value!r}")
    for edge in value:
        ports = [_parse_port(port, f"edge {edge!r}") for port in edge.split("->")] if isinstance(edge, str) else []
        if len(ports) < 2:
            raise InvalidInput(f"edges: expected a string such as 'a.0 -> b.1', got {edge!r}")
        if any(port for _, port in ports[1:-1]):
            raise InvalidInput(
                f"edge {edge!r}: expected names of nodes with one input and one output in the middle of a chain"
            )
        yield from itertools.pairwise(ports)


def _parse_inputs(value: Any) -> tuple[dict[str, tuple[PortName, ...]] | None, dict[str, int]]:
    """Parse `x = "a.0"`, `x = ["a.0", "b.0"]`, or `x = { to = [...], size = 3 }`."""
    if value is None:
        return None, {}
    inputs: dict[str, tuple[PortName, ...]] = {}
    sizes: dict[str, int] = {}
    for name, entry in _table(value, "inputs").items():
        where = f"inputs: '{name}'"
        ports = entry
        if isinstance(entry, Mapping):
            if set(entry) - {"to", "size"} or "to" not in entry:
                raise InvalidInput(f"{where}: expected the keys to and size, got {', '.join(entry) or 'none'}")
            ports = entry["to"]
            if "size" in entry:
                sizes[name] = _size(entry["size"], where)
        listed = [ports] if isinstance(ports, str) else _list(ports, where)
        inputs[name] = tuple(_parse_port(port, where) for port in listed)
    return inputs, sizes


def _parse_outputs(value: Any) -> dict[str, PortName] | None:
    """Parse a list of ports, or a table of names and ports."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {name: _parse_port(port, f"outputs: '{name}'") for name, port in value.items()}
    ports = [_parse_port(port, "outputs") for port in _list(value, "outputs")]
    several = {node for i, (node, _) in enumerate(ports) if node in [other for other, _ in ports[:i]]}
    return {f"{node}.{port or 0}" if node in several else node: (node, port) for node, port in ports}


def _parse_port(value: Any, where: str) -> PortName:
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{where}: expected a node, or a node and its port such as 'beam.0', got {value!r}")
    node, _, port = value.strip().partition(".")
    return node, port


def _size(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInput(f"{where}: expected an integer from 0, got {value!r}")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise InvalidInput(f"{where}: expected a string or a list of strings, got {value!r}")
    return value


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidInput(f"{where}: expected a table, got {value!r:.100}")
    return value
