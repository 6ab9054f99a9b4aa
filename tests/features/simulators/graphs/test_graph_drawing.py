"""Drawings of graphs: every box and line is there, nothing overlaps, and the command reports errors."""

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.cli import main
from dragoman_simulators.graphs.draw import draw_svg, draw_text
from dragoman_simulators.graphs.graph import Graph
from dragoman_simulators.graphs.layout import Box, Line, Picture, layout, make_picture
from features.simulators.graphs.test_graph_scheduling import Doubles

TEXT = """\
nodes = { a = { builtin = "exp", dim = 2 }, b = { builtin = "sin" }, c = { builtin = "sum" } }
edges = ["a -> b -> c.0", "a -> c.1"]
inputs = { x = "a" }
"""
DRAWN = """\
          ╭───╮
          │ x │
          ╰───╯
            │2
            ▼
       ┌─────────┐
       │    a    │
       │   exp   │
       │ E G J H │
       └─────────┘
            │2
     ┌──────┴─┐
     ▼        │
┌─────────┐   │
│    b    │   │
│   sin   │   │
│ E G J H │   │
└─────────┘   │
     │2       │
     └───┐   ┌┘
         ▼   ▼
     ┌───────────┐
     │     c     │
     │    sum    │
     │  E G J H  │
     └───────────┘
           │2
           ▼
         ╭───╮
         │ c │
         ╰───╯

inputs   x [2]
outputs  c [2]
can do   evaluate, gradient, apply_jacobian, apply_hessian; many points in one call
nodes    E evaluate, G gradient, J apply_jacobian, H apply_hessian, - missing
"""


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "graph.toml").write_text(TEXT)
    assert main(["graph", str(tmp_path), "--svg", str(tmp_path / "out.svg")]) == 0
    assert capsys.readouterr().out == DRAWN
    root = ET.parse(tmp_path / "out.svg").getroot()
    names = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
    title = root.findtext("{http://www.w3.org/2000/svg}title")
    assert title == tmp_path.name  # not the folders above it
    assert {"x", "a", "b", "c", "exp", "sin", "sum", "2", "E G J H"} <= names
    assert len([*root.iter("{http://www.w3.org/2000/svg}path")]) == 1 + 5  # the arrow's head, and a line each


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
    assert "│   exp   │" in capsys.readouterr().out
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
    assert "│  inner  │" in capsys.readouterr().out
    monkeypatch.setenv("DRAGOMAN_PLACEMENT", "nowhere")  # they are loaded under the server's settings
    assert main(["graph", str(tmp_path / "outer.graph.toml"), "--with", str(tmp_path / "inner.graph.toml")]) == 2
    assert "'placement': expected one of " in capsys.readouterr().err


def test_missing_abilities_are_drawn() -> None:
    g = Graph()
    g.output(g.exp(g.add(Doubles(), "twice")(g.input("x"))))
    text = draw_text(make_picture(g.build()))
    assert "│  twice  │" in text
    assert "│ E G J - │" in text


def test_the_picture_in_the_docs_is_up_to_date(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    assert main(["graph", str(root / "examples" / "scientific" / "posterior"), "--svg", str(tmp_path / "new.svg")]) == 0
    output, documented = (
        (p.read_text().split("</title>")[1]) for p in (tmp_path / "new.svg", root / "docs/graph-posterior.svg")
    )
    assert output == documented


@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    count = draw(st.integers(1, 12))
    boxes: list[Box] = []
    lines: list[Line] = []
    for i in range(count):
        outputs = draw(st.integers(1, 3))
        sources = draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else []
        for port, source in enumerate(sources):
            lines.append(Line(f"n{source}", draw(st.integers(0, boxes[source].outputs - 1)), f"n{i}", port, 2))
        boxes.append(Box(f"n{i}", "node", (f"n{i}" * draw(st.integers(1, 4)), "E G"), len(sources), outputs))
    return Picture(tuple(boxes), tuple(lines))


@settings(max_examples=60, deadline=None)
@given(pictures())
def test_boxes_never_overlap_and_lines_lead_downwards(picture: Picture) -> None:
    drawing = layout(picture, lambda box: len(box.texts[0]) + 4 + 2 * max(box.inputs, box.outputs), 1, 3)
    level = {key: i for i, layer in enumerate(drawing.layers) for key in layer}
    assert {key for key in level if not key.startswith("pass ")} == {box.key for box in picture.boxes}
    for layer in drawing.layers:
        for a, b in itertools.pairwise(layer):
            right = drawing.center[a] - drawing.width[a] // 2 + drawing.width[a]
            assert right + 3 <= drawing.center[b] - drawing.width[b] // 2
    for route in drawing.routes:
        assert [level[b] - level[a] for a, b in itertools.pairwise(route.stops)] == [1] * (len(route.stops) - 1)
    canvas = draw_text(picture)
    for box in picture.boxes:
        assert f"│{box.texts[0].center(drawing.width[box.key] - 2)}│" in canvas or box.texts[0] in canvas
    assert canvas.count("▼") >= len({(line.end, line.input) for line in picture.lines})
    ET.fromstring(draw_svg(picture, "a < b"))
