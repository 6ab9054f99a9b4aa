"""Graph files: formats, nodes, errors, and graphs as models."""

import asyncio
import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dragoman
from dragoman import Gradient, Infer, ModelSpec, errors
from dragoman.core.calls import Describe, Request
from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Config, VectorFunction, Vectors
from dragoman.engine.repository import DiskRepository
from dragoman.runtimes.recognise import model_file, recognise
from dragoman_simulators.graph_runtime.model import GraphModel, load_graph, read_graph
from dragoman_simulators.graphs.document import parse_document
from dragoman_simulators.graphs.function import GraphFunction
from vector_calls import vector

FILES = Path(__file__).parent / "served"


def load_toml(folder: Path, text: str, name: str = "graph.toml") -> GraphFunction:
    (folder / name).write_text(text)
    return load_graph(read_graph(folder / name), folder / name)


# --- the forms -------------------------------------------------------------------------------------------

TOML = """
edges = ["e -> s.0", "f.0 -> s.1"]
outputs = { y = "s" }
bind = { "f.0" = [1.0, 2.0] }

[nodes]
e = { builtin = "exp" }
f = { builtin = "sin" }
s = { builtin = "sum" }

[inputs]
x = { to = ["e"], size = 2 }
"""


def test_toml_json_and_yaml_are_equivalent(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    table = {
        "edges": ["e -> s.0", "f.0 -> s.1"],
        "outputs": {"y": "s"},
        "bind": {"f.0": [1.0, 2.0]},
        "nodes": {"e": {"builtin": "exp"}, "f": {"builtin": "sin"}, "s": {"builtin": "sum"}},
        "inputs": {"x": {"to": ["e"], "size": 2}},
    }
    yaml = """
nodes:
  e: {builtin: exp}
  f: {builtin: sin}
  s: {builtin: sum}
edges: [e -> s.0, f.0 -> s.1]
outputs: {y: s}
bind: {f.0: [1.0, 2.0]}
inputs: {x: {to: [e], size: 2}}
"""
    for name, text in (("graph.toml", TOML), ("some.graph.json", json.dumps(table)), ("graph.yaml", yaml)):
        graph = load_toml(tmp_path, text, name)
        assert (graph.input_names, graph.output_names) == (("x",), ("y",))
        result = graph.evaluate([np.array([0.0, 1.0])], {})[0]
        np.testing.assert_allclose(result, np.exp([0, 1]) + np.sin([1, 2]))
        graph.close()


def test_yaml_without_its_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InvalidInput, match=r"YAML needs the package 'pyyaml' \(pip install pyyaml\)"):
        load_toml(tmp_path, "nodes: {}", "graph.yml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "a graph: expected a table, got []"),
        ({"node": {}}, "unknown key 'node' in a graph: expected one of name, threads, nodes, "),
        ({"threads": -1}, "threads: expected an integer from 0 to 1024, got -1"),
        ({"name": 3}, "name: expected a string, got 3"),
        ({"nodes": {"a": 3}}, "node 'a': expected a table, got 3"),
        ({"nodes": {"a": {}}}, "node 'a': expected one of fn, model, umbridge, served, builtin, linear, got nothing"),
        (
            {"nodes": {"a": {"builtin": "sum", "linear": "B.npy"}}},
            "node 'a': expected one of fn, model, umbridge, served",
        ),
        (
            {"nodes": {"a": {"builtin": "sum", "passes": "x"}}},
            "node 'a': passes: expected a list of keys of the config",
        ),
        ({"nodes": {"a": {"builtin": "sum", "config": 1}}}, "node 'a': config: expected a table, got 1"),
        (
            {"nodes": {"a": {"builtin": "sum", "concurrency": "8"}}},
            "concurrency: expected an integer from 0, got '8'",
        ),
        ({"nodes": {"a": {"builtin": "sum", "cache": -1}}}, "node 'a': cache: expected an integer from 0, got -1"),
        ({"edges": "a -> b"}, "edges: expected a list of strings such as 'a.0 -> b.1', got 'a -> b'"),
        ({"edges": ["a"]}, "edges: expected a string such as 'a.0 -> b.1', got 'a'"),
        ({"edges": [1]}, "edges: expected a string such as 'a.0 -> b.1', got 1"),
        ({"edges": ["a -> "]}, "edge 'a -> ': expected a node, or a node and its port such as 'beam.0', got ' '"),
        ({"edges": ["a -> b.1 -> c"]}, "edge 'a -> b.1 -> c': expected names of nodes with one input"),
        ({"inputs": {"x": 1}}, "inputs: 'x': expected a string or a list of strings, got 1"),
        ({"inputs": {"x": {"size": 1}}}, "inputs: 'x': expected the keys to and size, got size"),
        ({"inputs": {"x": {"to": "a", "size": -1}}}, "inputs: 'x': expected an integer from 0, got -1"),
        ({"outputs": 1}, "outputs: expected a string or a list of strings, got 1"),
        ({"bind": [1]}, "bind: expected a table, got [1]"),
    ],
)
def test_errors_of_files(table: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        parse_document(table)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(
    ["name", "threads", "nodes", "edges", "inputs", "outputs", "bind", "a", "builtin", "fn", "config"]
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(_KEYS, _JSON | st.dictionaries(_KEYS, _JSON | st.dictionaries(_KEYS, _JSON))))
def test_any_table_is_a_graph_or_an_input_error(table: Any) -> None:
    with suppress(InvalidInput):
        assert isinstance(parse_document(table).nodes, tuple)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ('{ builtin = "summ" }', "node 'a': unknown built-in node 'summ'"),
        ("{ builtin = 3 }", "node 'a': builtin: expected a string, got 3"),
        ('{ linear = "B.npy" }', "node 'a': matrix: '{folder}/B.npy' cannot be read: "),
        ('{ linear = "B.csv" }', "node 'a': matrix: expected numbers or the name of a .npy file, got 'B.csv'"),
        ("{ linear = [[1.0]], shif = 3 }", "node 'a': unknown option 'shif' of a 'linear' node: expected shift"),
        ('{ fn = "fields.py" }', "node 'a': fn: expected 'file.py:name' or 'module:name', got 'fields.py'"),
        ('{ fn = "fields.py:nothing" }', "node 'a': cannot import '{folder}/fields.py:nothing'"),
        ('{ fn = "none.py:field" }', "node 'a': cannot import '{folder}/none.py:field': FileNotFoundError"),
        ('{ fn = "fields.py:field", derivates = "jax" }', "node 'a': unknown option 'derivates' of a 'fn' node"),
        ('{ fn = "fields.py:field", derivatives = "jaxx" }', "node 'a': derivatives: expected one of auto, jax, torch"),
        ('{ fn = "fields.py:np.float64" }', "node 'a': class float64 is not a model"),
        ('{ umbridge = "http://127.0.0.1:9" }', "node 'a': no server of http://127.0.0.1:9 answers"),
        ('{ umbridge = "http://127.0.0.1:9", modell = "x" }', "node 'a': unknown parameter 'modell'"),
    ],
)
def test_nodes_that_cannot_be_created(tmp_path: Path, node: str, message: str) -> None:
    (tmp_path / "fields.py").write_text((FILES / "fields.py").read_text())
    with pytest.raises(errors.DragomanError, match=re.escape(message.replace("{folder}", str(tmp_path)))):
        load_toml(tmp_path, f"[nodes]\na = {node}\n")


@pytest.mark.parametrize(("name", "text"), [("graph.json", '{"a":' * 100_000), ("graph.toml", "a = " + "[" * 100_000)])
def test_a_file_that_nests_deep(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=name):
        read_graph(tmp_path / name)


def test_a_file_that_is_not_a_graph(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"graph\.toml cannot be read: Expected '=' after a key"):
        load_toml(tmp_path, "nodes")
    with pytest.raises(InvalidInput, match=r"is not a graph: expected a file graph\.toml"):
        read_graph(tmp_path / "graph.txt")


# --- nodes in Python -------------------------------------------------------------------------------------

CODE = """
import numpy as np
import dragoman

def plain(x):
    return np.sin(x)

@dragoman.vector_function(inputs=[2], derivatives=None)
def marked(x):
    return 3 * x

class Whole(dragoman.Model):
    pass
"""


def test_options_of_a_function_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    graph = load_toml(
        tmp_path,
        """
        edges = ["a -> b -> c"]
        [nodes]
        a = { fn = "code.py:plain", inputs = [2], derivatives = "complex step" }
        b = { fn = "code.py:marked", linear = true, derivatives = "finite differences" }
        c = { builtin = "gaussian_logpdf" }
        """,
    )
    assert "gradient" in graph.sources()
    assert graph.wiring.nodes["a"].function.sources()["gradient"] == "complex step"
    assert graph.wiring.nodes["b"].affine
    x = np.array([0.3, -0.5])
    expected = -9 * np.sin(x) * np.cos(x)
    np.testing.assert_allclose(graph.gradient(0, 0, [x], np.ones(1), {}), expected, rtol=1e-6)


def test_a_model_that_is_not_a_vector_function_is_not_a_node(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    with pytest.raises(
        InvalidInput, match=r"'code.py:Whole' is not a vector function; serve it as a model and refer to it"
    ):
        load_toml(tmp_path, '[nodes]\na = { model = "code.py:Whole" }')


def test_calls_of_a_node_are_bounded(tmp_path: Path) -> None:
    """Each call waits for a second one, and finds no third."""
    (tmp_path / "code.py").write_text(
        """
import threading

meeting = threading.Barrier(2)
inside = []


def busy(x):
    inside.append(x)
    meeting.wait(60)
    count = len(inside)
    meeting.wait(60)
    inside.clear()
    meeting.wait(60)
    return [count]
"""
    )
    options = "inputs = [1], outputs = [1], derivatives = 'none', concurrency = 2"
    graph = load_toml(tmp_path, f"[nodes]\na = {{ fn = 'code.py:busy', {options} }}")
    with ThreadPoolExecutor(8) as threads:
        counts = threads.map(lambda _: graph.evaluate([np.ones(1)], {})[0].tolist(), range(8))
        assert list(counts) == [[2.0]] * 8


# --- as models -------------------------------------------------------------------------------------------


def test_graphs_are_recognised(tmp_path: Path) -> None:
    folder = tmp_path / "beam"
    folder.mkdir()
    (folder / "model.py").write_text("")
    assert recognise(folder) == "python"
    (folder / "graph.toml").write_text(TOML)
    (tmp_path / "other.graph.toml").write_text(TOML)
    (tmp_path / "named.graph.toml").write_text('name = "said"\n' + TOML)
    (tmp_path / "paragraph.toml").write_text("")
    assert (recognise(folder), model_file(folder)) == ("graph", folder)
    assert recognise(tmp_path / "other.graph.toml") == "graph"
    assert recognise(tmp_path / "paragraph.toml") is None
    sources = DiskRepository([str(tmp_path)], {}).scan()
    assert sorted(sources) == ["beam", "other", "said"]
    assert {spec.runtime for source in sources.values() for spec in source.specs()} == {"graph"}
    assert [*DiskRepository([str(folder / "graph.toml")], {}).scan()] == ["beam"]


async def test_a_graph_of_built_in_nodes_runs_in_the_server(tmp_path: Path) -> None:
    (tmp_path / "g.graph.toml").write_text(TOML)
    async with dragoman.open_engine(tmp_path / "g.graph.toml") as engine:
        assert [d.placement for d in engine.deployments()] == ["inline"]
        description = (await engine.call(Request(Describe(), "g"))).answer
        graph = description.details["graph"]
        assert graph["nodes"]["e"]["gradient"] == "built in"
        assert sorted(graph["edges"], key=str) == [
            {"from": {"constant": "1, 2"}, "to": {"node": "f", "port": "0"}, "size": 2},
            {"from": {"input": "x"}, "to": {"node": "e", "port": "0"}, "size": 2},
            {"from": {"node": "e", "port": "0"}, "to": {"node": "s", "port": "0"}, "size": 2},
            {"from": {"node": "f", "port": "0"}, "to": {"node": "s", "port": "1"}, "size": 2},
            {"from": {"node": "s", "port": "0"}, "to": {"output": "y"}, "size": 2},
        ]
        rows = await engine.infer("g", {"x": np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])})
        np.testing.assert_allclose(rows["y"], np.exp(np.arange(6).reshape(3, 2)) + np.sin([1, 2]))
        call = Gradient(positional=(vector(0, 1),), sens=vector(1, 10))
        result = (await engine.call(Request(call, "g"))).answer
        np.testing.assert_allclose(result.data, [1, 10 * np.e])


async def test_a_graph_without_inputs_is_a_constant(tmp_path: Path) -> None:
    (tmp_path / "c.graph.toml").write_text(
        "edges = ['c -> e']\n[nodes]\nc = { builtin = 'constant', value = [0.0, 1.0] }\ne = { builtin = 'exp' }"
    )
    async with dragoman.open_engine(tmp_path / "c.graph.toml") as engine:
        result = (await engine.call(Request(Infer({}, positional=()), "c"))).answer
        np.testing.assert_allclose(result.outputs["e"].data, [1, np.e])


async def test_missing_abilities_are_in_the_metadata(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "g.graph.toml").write_text(
        "edges = ['a -> b']\\n[nodes]\\na = { fn = 'code.py:marked' }\\nb = { builtin = 'exp' }".replace("\\n", "\n")
    )
    async with dragoman.open_engine(tmp_path / "g.graph.toml", placement="thread") as engine:
        description = (await engine.call(Request(Describe(), "g"))).answer
        assert description.details["derivatives"] == {}
        assert description.details["graph"]["missing"]["gradient"] == "'a' has no gradient"
        with pytest.raises(errors.NotSupported, match="Gradient: node 'a' does not support gradient"):
            await engine.call(Request(Gradient(positional=(vector(0, 1),), sens=vector(1, 1)), "g"))


async def test_an_invalid_graph_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "g.graph.toml").write_text("edges = ['a -> b']\n[nodes]\na = { builtin = 'exp' }")
    async with dragoman.open_engine(tmp_path / "g.graph.toml") as engine:
        (deployment,) = engine.deployments()
        assert deployment.reason == "failed to load 'g', unknown node 'b': expected one of 'a'"


async def test_the_error_names_the_server_that_is_down(tmp_path: Path) -> None:
    async with dragoman.Server(f"{FILES / 'powers.py'}:Powers", http_port=0, grpc_port=-1, placement="thread") as far:
        (tmp_path / "g.graph.toml").write_text(f"[nodes]\nfar = {{ umbridge = '{far.http_url}' }}")
        engine = dragoman.open_engine(tmp_path / "g.graph.toml")
        await engine.start()
        call = Infer({}, positional=(vector(1, 2, 3),))
        assert [t.data.tolist() for t in (await engine.call(Request(call, "g"))).answer.outputs.values()] == [
            [1, 4, 9],
            [36],
        ]
    try:
        with pytest.raises(errors.NotReady, match=re.escape(f"node 'far': no server of {far.http_url} answers")):
            await asyncio.wait_for(engine.call(Request(call, "g")), 60)
    finally:
        await engine.close()


async def test_a_graph_built_in_python_runs_calls_concurrently() -> None:
    """Each evaluation waits for another one, of another call."""
    meeting = threading.Barrier(2)

    class Meets(VectorFunction):
        input_sizes = output_sizes = lambda self, config: [1]

        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            meeting.wait(60)
            return inputs[0]

    g = dragoman.Graph("built")
    g.output(g.exp(g.add(Meets(), "meets")(g.input("x"))), "y")
    async with dragoman.open_engine(g.build()) as engine:
        call = Infer({}, positional=(vector(0),))
        async with asyncio.timeout(60):
            responses = await asyncio.gather(*(engine.call(Request(call, "built")) for _ in range(4)))
        assert [a.answer.outputs["y"].data.tolist() for a in responses] == [[1.0]] * 4
        description = (await engine.call(Request(Describe(), "built"))).answer
        assert description.details["graph"]["missing"]["gradient"] == "'meets' has no gradient"


@pytest.mark.parametrize("threads", [0, 4])
async def test_after_a_cancellation_no_further_node_is_called(threads: int) -> None:
    started, proceed, ended = threading.Event(), threading.Event(), threading.Event()
    further: list[Any] = []

    class First(VectorFunction):
        input_sizes = output_sizes = lambda self, config: [1]

        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            started.set()
            assert proceed.wait(60)
            ended.set()
            return inputs[0]

    class Second(First):
        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            further.append(inputs)
            return inputs[0]

    g = dragoman.Graph("two", threads=threads)
    x = g.input("x")
    g.output(g.sum(*(g.add(Second())(g.add(First())(x)) for _ in range(2))), "y")
    async with dragoman.open_engine(g.build()) as engine:
        request = asyncio.ensure_future(engine.call(Request(Infer({}, positional=(vector(0),)), "two")))
        assert await asyncio.to_thread(started.wait, 20)
        request.cancel()
        await asyncio.wait({request})
        proceed.set()
        assert await asyncio.to_thread(ended.wait, 20)
        await engine.call(Request(Infer({}, positional=(vector(1),)), "two"))
    assert [x[0].tolist() for x in further] == [[1.0], [1.0]]  # of the second call alone


async def test_parameters_of_a_graph(tmp_path: Path) -> None:
    path = tmp_path / "g.graph.toml"
    path.write_text(TOML)
    for parameters, message in [
        ({"concurency": 3}, "unknown parameter 'concurency' of a graph: expected concurrency"),
        ({"concurrency": 0}, "parameter 'concurrency': expected an integer from 1, got 0"),
    ]:
        with pytest.raises(errors.ModelFailed, match=re.escape(message)):
            GraphModel(ModelSpec(name="g", uri=str(path), parameters=parameters))


def test_a_node_file_that_serves_at_import_is_a_short_error(tmp_path: Path) -> None:
    text = (FILES / "powers.py").read_text().partition("if __name__")[0]
    (tmp_path / "powers.py").write_text(text + "umbridge.serve_models([Powers()])\n")
    line = text.count("\n") + 1
    with pytest.raises(errors.ModelFailed, match=f"node 'p': 'powers.py' calls serve_models in line {line}, which"):
        load_toml(tmp_path, '[nodes]\np = { model = "powers.py:Powers" }\n')
