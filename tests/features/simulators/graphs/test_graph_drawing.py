"""`dragoman graph`: the diagram has every node and edge, any name is valid, and the command reports errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from dragoman.cli import main
from dragoman_simulators.graphs.builtin import built_in
from dragoman_simulators.graphs.description import draw_mermaid
from dragoman_simulators.graphs.function import GraphFunction
from dragoman_simulators.graphs.graph import Graph, make_node
from dragoman_simulators.graphs.wiring import wire
from features.simulators.graphs.test_graph_details import graph as wire_functions
from features.simulators.graphs.test_graph_scheduling import Doubles

TEXT = """\
nodes = { a = { builtin = "exp", dim = 2 }, b = { builtin = "sin" }, c = { builtin = "sum" } }
edges = ["a -> b -> c.0", "a -> c.1"]
inputs = { x = "a" }
"""
DIAGRAM = """\
flowchart TD
    i0(["x"])
    n0["a<br/>exp<br/>E G J H"]
    n1["b<br/>sin<br/>E G J H"]
    n2["c<br/>sum<br/>E G J H"]
    o0(["c"])
    i0 -->|"[2]"| n0
    n0 -->|"[2]"| n1
    n1 -->|"[2] → .0"| n2
    n0 -->|"[2] → .1"| n2
    n2 -->|"[2]"| o0
%% inputs   x [2]
%% outputs  c [2]
%% can do   evaluate, gradient, apply_jacobian, apply_hessian; many points in one call
%% nodes    E evaluate, G gradient, J apply_jacobian, H apply_hessian, - missing
"""


def test_the_command_prints_a_diagram(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "graph.toml").write_text(TEXT)
    assert main(["graph", str(tmp_path)]) == 0
    assert capsys.readouterr().out == DIAGRAM


def test_the_command_describes_a_graph_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "graph.toml").write_text(TEXT.replace('inputs = { x = "a" }', '[bind]\n"a.0" = [1, 0.5]'))
    assert main(["graph", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["inputs"], found["outputs"]) == (tmp_path.name, [], [{"name": "c", "size": 2}])
    assert [(node["name"], node["label"], node["abilities"]["gradient"]) for node in found["nodes"]] == [
        ("a", "exp", "built in"),
        ("b", "sin", "built in"),
        ("c", "sum", "built in"),
    ]
    assert found["abilities"]["evaluate"] == "graph"
    assert (found["missing"], found["vectorised"]) == ({}, False)
    assert found["edges"] == [
        {"from": {"value": [1.0, 0.5]}, "to": {"node": "a", "input": 0}, "size": 2},
        {"from": {"node": "a", "output": 0}, "to": {"node": "b", "input": 0}, "size": 2},
        {"from": {"node": "b", "output": 0}, "to": {"node": "c", "input": 0}, "size": 2},
        {"from": {"node": "a", "output": 0}, "to": {"node": "c", "input": 1}, "size": 2},
        {"from": {"node": "c", "output": 0}, "to": {"output": "c"}, "size": 2},
    ]


def test_the_command_draws_graphs_built_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "built.py").write_text(
        "import dragoman\ng = dragoman.Graph('g')\ng.output(g.exp(g.input('x', 2)))\nbuilt = g.build()\nother = 3\n"
    )
    assert main(["graph", f"{tmp_path / 'built.py'}:built"]) == 0
    assert '["exp<br/>E G J H"]' in capsys.readouterr().out
    assert main(["graph", f"{tmp_path / 'built.py'}:other"]) == 2
    assert "int is not a vector function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("edges = ['a -> b']\n[nodes]\na = { builtin = 'exp' }", "unknown node 'b': expected one of 'a'"),
        ("nodes = 3", "graph.toml: nodes: expected a table, got 3"),
        ("[nodes]\na = { served = 'm' }", "node 'a': served: 'm' is available only in the server's process"),
    ],
)
def test_the_command_reports_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    (tmp_path / "graph.toml").write_text(content)
    assert main(["graph", str(tmp_path / "graph.toml")]) == 2
    assert message in capsys.readouterr().err
    assert main(["graph", str(tmp_path / "none.toml")]) == 2
    assert "not found: expected a graph file" in capsys.readouterr().err


def test_models_named_by_a_graph_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner.graph.toml").write_text("[nodes]\na = { builtin = 'exp', dim = 2 }")
    (tmp_path / "outer.graph.toml").write_text(
        "edges = ['a -> b']\n[nodes]\na = { served = 'inner' }\nb = { builtin = 'sin' }"
    )
    assert main(["graph", str(tmp_path / "outer.graph.toml"), "--with", str(tmp_path / "inner.graph.toml")]) == 0
    assert "<br/>inner<br/>" in capsys.readouterr().out
    monkeypatch.setenv("DRAGOMAN_PLACEMENT", "nowhere")  # they are loaded under the server's settings
    assert main(["graph", str(tmp_path / "outer.graph.toml"), "--with", str(tmp_path / "inner.graph.toml")]) == 2
    assert "'placement': expected one of " in capsys.readouterr().err


def test_missing_abilities_are_shown() -> None:
    g = Graph()
    g.output(g.exp(g.add(Doubles(), "twice")(g.input("x"))))
    text = draw_mermaid(g.build())
    assert '["twice<br/>E G J -"]' in text
    assert "\n%% no apply_hessian: node 'twice' has no apply_hessian\n" in text


def test_the_diagram_in_the_docs_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[4]
    assert main(["graph", str(root / "examples" / "scientific" / "posterior")]) == 0
    assert f"```mermaid\n{capsys.readouterr().out}```\n" in (root / "docs" / "graphs.md").read_text()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("theta_0", "theta_0"),
        ("größe 2.5", "größe 2.5"),
        ('a "quoted" name', "a#32;#34;quoted#34;#32;name"),
        ("%%{init: {}}%%", "#37;#37;#123;init#58;#32;#123;#125;#125;#37;#37;"),
        ("#35;", "#35;35#59;"),
        ("`code`", "#96;code#96;"),
        ("<b>&amp;", "#60;b#62;#38;amp#59;"),
        ("1. one", "1#46;#32;one"),
        ("- a\n b", "#45;#32;a#10;#32;b"),
        ("__init__", "#95;#95;init#95;#95;"),
        ("end", "end"),
        ("\U0001f600", "#128512;"),
        ("", "#160;"),
    ],
)
def test_names_are_escaped(name: str, shown: str) -> None:
    node = make_node("n", built_in("exp", {"dim": 1}), label=name)
    graph = GraphFunction(wire([node], [], inputs={name: [("n", "")]}, outputs={name: ("n", "")}))
    diagram, comments = draw_mermaid(graph).split("%% ", 1)
    label = f"{shown}<br/>" if name else "elementwise<br/>"
    assert diagram.splitlines()[1:4] == [
        f'    i0(["{shown}"])',
        f'    n0["n<br/>{label}E G J H"]',
        f'    o0(["{shown}"])',
    ]
    assert len(comments.splitlines()) == 4
    assert "%%{" not in comments


def test_bound_values_and_ports_are_shown() -> None:
    nodes = {"s": built_in("split", {"sizes": [3, 1]}), "t": built_in("sum", {})}
    graph = wire_functions(
        [(("s", "0"), ("t", "0"))],
        nodes,
        inputs={"x": [("s", "")]},
        outputs={"total": ("t", ""), "rest": ("s", "1")},
        bound={("t", "1"): np.array([1, 2.5, 1e-7])},
    )
    lines = draw_mermaid(graph).splitlines()
    assert '    b0{{"1, 2.5, 1e-07"}}' in lines
    assert [line.strip() for line in lines if "-->" in line] == [
        'i0 -->|"[4]"| n0',
        'n0 -->|"[3] .0 → .0"| n1',
        'b0 -->|"[3] → .1"| n1',
        'n1 -->|"[3]"| o0',
        'n0 -->|"[1] .1 →"| o1',
    ]
    long = wire_functions(nodes={"t": built_in("sum", {})}, bound={("t", "1"): np.arange(4.0)})
    assert '{{"0, 1, 2, ..."}}' in draw_mermaid(long)
