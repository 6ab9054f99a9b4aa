"""Descriptions of a graph: a Mermaid flowchart, a summary in lines, and JSON values."""

from collections.abc import Iterator, Mapping
from typing import Any

from dragoman.core.vectors import ABILITIES, Ability
from dragoman_simulators.graphs.function import GraphFunction
from dragoman_simulators.graphs.sizes import Sizes
from dragoman_simulators.graphs.wiring import BoundValue, GraphInput, Node, Port, Wiring

# The letter of each ability.
LETTERS: Mapping[Ability, str] = dict(zip(ABILITIES, "EGJH", strict=True))


def draw_mermaid(graph: GraphFunction) -> str:
    """Return a Mermaid flowchart of a graph, with the lines of `summarize` as comments.

    An edge shows the size of its vector in brackets, and the ports that it connects where a node has several.
    """
    wiring, sizes = graph.wiring, graph.sizes({})
    keys = {name: f"n{i}" for i, name in enumerate(wiring.nodes)}
    lines = ["flowchart TD"]
    lines += [f'    i{i}(["{_escape(name)}"])' for i, name in enumerate(wiring.input_names)]
    lines += [f'    {keys[name]}["{_label(node)}"]' for name, node in wiring.nodes.items()]
    lines += [f'    o{i}(["{_escape(name)}"])' for i, name in enumerate(wiring.output_names)]
    bound = 0
    for name, sources in wiring.sources.items():
        for i, source in enumerate(sources):
            start_port = ""
            match source:
                case Port():
                    start, start_port = keys[source.node], _port(source, wiring)
                case GraphInput():
                    start = f"i{source.index}"
                case _:
                    start, bound = f"b{bound}", bound + 1
                    lines.append(f'    {start}{{{{"{_shorten(source)}"}}}}')
            end_port = f".{i}" if len(sources) > 1 else ""
            lines.append(_edge(start, start_port, keys[name], end_port, sizes.node_inputs[name][i]))
    for i, (port, size) in enumerate(zip(wiring.outputs, sizes.outputs, strict=True)):
        lines.append(_edge(keys[port.node], _port(port, wiring), f"o{i}", "", size))
    return "\n".join([*lines, *(f"%% {_escape_comment(line)}" for line in summarize(graph))])


def summarize(graph: GraphFunction) -> list[str]:
    """Return lines about inputs, outputs, abilities, and the nodes that prevent further abilities."""
    sizes: Sizes = graph.sizes({})
    lines = [
        f"inputs   {_join_sizes(graph.input_names, sizes.inputs)}",
        f"outputs  {_join_sizes(graph.output_names, sizes.outputs)}",
        f"can do   {', '.join(graph.sources())}" + ("; many points in one call" if graph.vectorised else ""),
    ]
    for ability in ABILITIES:
        step = graph.missing_step(ability)
        if step is not None:
            lines.append(f"no {ability}: node '{step.node}' has no {step.ability}")
    letters = ", ".join(f"{letter} {ability}" for ability, letter in LETTERS.items())
    return [*lines, f"nodes    {letters}, - missing"]


def describe(graph: GraphFunction) -> dict[str, Any]:
    """Return a graph as JSON values: vectors with their sizes, nodes, edges, and why abilities are missing."""
    wiring, sizes = graph.wiring, graph.sizes({})
    steps = {ability: graph.missing_step(ability) for ability in ABILITIES}
    return {
        "inputs": _named_sizes(graph.input_names, sizes.inputs),
        "outputs": _named_sizes(graph.output_names, sizes.outputs),
        "abilities": dict(graph.sources()),
        "missing": {
            ability: {"node": step.node, "ability": step.ability} for ability, step in steps.items() if step is not None
        },
        "vectorised": graph.vectorised,
        "nodes": [
            {"name": name, "label": node.label or name, "abilities": dict(node.function.sources())}
            for name, node in wiring.nodes.items()
        ],
        "edges": [*_edges(wiring, sizes)],
    }


def _edges(wiring: Wiring, sizes: Sizes) -> Iterator[dict[str, Any]]:
    for name in wiring.nodes:
        for i, source in enumerate(wiring.sources[name]):
            match source:
                case Port():
                    start: dict[str, Any] = {"node": source.node, "output": source.index}
                case GraphInput():
                    start = {"input": wiring.input_names[source.index]}
                case _:
                    start = {"value": [*map(float, source.value)]}
            yield {"from": start, "to": {"node": name, "input": i}, "size": sizes.node_inputs[name][i]}
    for name, port, size in zip(wiring.output_names, wiring.outputs, sizes.outputs, strict=True):
        yield {"from": {"node": port.node, "output": port.index}, "to": {"output": name}, "size": size}


def _named_sizes(names: tuple[str, ...], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"name": name, "size": size} for name, size in zip(names, sizes, strict=True)]


def _port(port: Port, wiring: Wiring) -> str:
    return f".{port.index}" if wiring.output_counts[port.node] > 1 else ""


def _edge(start: str, start_port: str, end: str, end_port: str, size: int) -> str:
    ports = f" {start_port} → {end_port}".replace("  ", " ").rstrip() if start_port or end_port else ""
    return f'    {start} -->|"[{size}]{ports}"| {end}'


def _shorten(value: BoundValue) -> str:
    return ", ".join(_escape(f"{v:g}") for v in value.value[:3]) + (", ..." if len(value.value) > 3 else "")


def _label(node: Node) -> str:
    sources = node.function.sources()
    letters = " ".join(
        letter if ability in sources or (node.affine and ability == "apply_hessian") else "-"
        for ability, letter in LETTERS.items()
    )
    label = (_escape(node.label),) if node.label and node.label != node.name else ()
    return "<br/>".join((_escape(node.name), *label, letters))


def _escape(text: str) -> str:
    """Return text for a quoted label of Mermaid, which reads some characters as Markdown, HTML or its own syntax.

    Letters and digits of any language stay; so do spaces, underscores, hyphens and decimal points between them.
    Empty text becomes a space, as Mermaid rejects an empty label.
    """
    inner = " _-"
    return (
        "".join(
            c
            if c.isalnum()
            or (0 < i < len(text) - 1 and c in inner and text[i - 1].isalnum() and text[i + 1].isalnum())
            or (c == "." and text[i - 1 : i].isdecimal() and text[i + 1 : i + 2].isdecimal())
            else f"#{ord(c)};"
            for i, c in enumerate(text)
        )
        or "#160;"
    )


def _escape_comment(line: str) -> str:
    """Return a line for a comment, without line breaks and without the characters of Mermaid's directives."""
    return "".join(c if c.isprintable() and c not in "{}%" else f"#{ord(c)};" for c in line)


def _join_sizes(names: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{name} [{size}]" for name, size in zip(names, sizes, strict=True)) or "none"
