"""Parsing of graph files: every key, and the complete message of every error."""

from typing import Any

import pytest

from dragoman.core.errors import InvalidInput
from dragoman_simulators.graphs.document import GraphDocument, NodeEntry, parse_document

KINDS = "expected one of fn, model, umbridge, served, builtin, linear"


def test_every_key_is_parsed() -> None:
    document = parse_document(
        {
            "name": "g",
            "threads": 0,
            "nodes": {
                "a": {
                    "fn": "f.py:f",
                    "passes": ["k"],
                    "linear": True,
                    "concurrency": 2,
                    "cache": 3,
                    "config": {"c": 1},
                    "derivatives": "jax",
                },
                "b": {"umbridge": "http://h", "model": "m", "linear": False},
                "c": {"served": "s"},
                "d": {"builtin": "sum"},
                "e": {"linear": [[1]], "shift": 2},
                "f": {"model": "m", "passes": []},
            },
            "edges": ["a.0 -> b.x", "b->c ->  d.1"],
            "inputs": {"x": "a", "y": ["b.0", "b.1"], "z": {"to": "c.1", "size": 0}, "w": {"to": ["d", "e"]}},
            "outputs": {"u": "d.0"},
            "bind": {"e.2": [1, 2]},
        }
    )
    assert document == GraphDocument(
        name="g",
        threads=0,
        nodes=(
            NodeEntry("a", "fn", "f.py:f", {"c": 1}, ("k",), True, 2, 3, {"derivatives": "jax"}),
            NodeEntry("b", "umbridge", "http://h", options={"model": "m"}),
            NodeEntry("c", "served", "s"),
            NodeEntry("d", "builtin", "sum"),
            NodeEntry("e", "linear", [[1]], options={"shift": 2}),
            NodeEntry("f", "model", "m", passes=()),
        ),
        edges=((("a", "0"), ("b", "x")), (("b", ""), ("c", "")), (("c", ""), ("d", "1"))),
        inputs={
            "x": (("a", ""),),
            "y": (("b", "0"), ("b", "1")),
            "z": (("c", "1"),),
            "w": (("d", ""), ("e", "")),
        },
        outputs={"u": ("d", "0")},
        bound={("e", "2"): [1, 2]},
        sizes={"z": 0},
    )
    assert [node.label for node in document.nodes] == ["fn", "umbridge", "s", "sum", "linear", "model"]


def test_defaults_of_keys() -> None:
    assert parse_document({}) == GraphDocument(nodes=())
    built = GraphDocument(nodes=())
    assert (built.name, built.threads, built.edges, built.inputs, built.outputs, built.bound, built.sizes) == (
        "",
        8,
        (),
        None,
        None,
        {},
        {},
    )
    node = NodeEntry("n", "fn", "f")
    assert (node.config, node.passes, node.linear, node.concurrency, node.cache, node.options) == (
        {},
        None,
        False,
        0,
        0,
        {},
    )
    assert parse_document({"nodes": {"n": {"fn": "f"}}}).nodes == (node,)
    assert parse_document({"threads": 1024}).threads == 1024
    assert parse_document({"inputs": {}}).inputs == {}


def test_outputs_in_a_list_are_named_after_their_nodes() -> None:
    assert parse_document({"outputs": ["a", "b.2"]}).outputs == {"a": ("a", ""), "b": ("b", "2")}
    assert parse_document({"outputs": ["a", "b.2", "a.x"]}).outputs == {
        "a.0": ("a", ""),
        "b": ("b", "2"),
        "a.x": ("a", "x"),
    }


END = "expected a node, or a node and its port such as 'beam.0'"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "a graph: expected a table, got []"),
        ({1: 2}, "a graph: expected a table, got {1: 2}"),
        (
            {"node": 1},
            "unknown key 'node' in a graph: expected one of name, threads, nodes, edges, inputs, outputs, bind",
        ),
        ({"threads": 1025}, "threads: expected an integer from 0 to 1024, got 1025"),
        ({"threads": -1}, "threads: expected an integer from 0 to 1024, got -1"),
        ({"threads": True}, "threads: expected an integer from 0 to 1024, got True"),
        ({"threads": 1.0}, "threads: expected an integer from 0 to 1024, got 1.0"),
        ({"name": None}, "name: expected a string, got None"),
        ({"nodes": 3}, "nodes: expected a table, got 3"),
        ({"nodes": "x" * 200}, f"nodes: expected a table, got '{'x' * 99}"),
        ({"nodes": {"a": 3}}, "node 'a': expected a table, got 3"),
        ({"nodes": {"a": {}}}, f"node 'a': {KINDS}, got nothing"),
        ({"nodes": {"a": {"x": 1, "y": 2}}}, f"node 'a': {KINDS}, got x, y"),
        ({"nodes": {"a": {"builtin": "sum", "linear": "B"}}}, f"node 'a': {KINDS}, got builtin and linear"),
        ({"nodes": {"a": {"model": "m", "fn": "f"}}}, f"node 'a': {KINDS}, got fn and model"),
        (
            {"nodes": {"a": {"fn": "f", "passes": "x"}}},
            "node 'a': passes: expected a list of keys of the config, got 'x'",
        ),
        (
            {"nodes": {"a": {"fn": "f", "passes": ["x", 1]}}},
            "node 'a': passes: expected a list of keys of the config, got ['x', 1]",
        ),
        ({"nodes": {"a": {"fn": "f", "config": 1}}}, "node 'a': config: expected a table, got 1"),
        (
            {"nodes": {"a": {"fn": "f", "concurrency": "8"}}},
            "node 'a': concurrency: expected an integer from 0, got '8'",
        ),
        ({"nodes": {"a": {"fn": "f", "cache": -1}}}, "node 'a': cache: expected an integer from 0, got -1"),
        ({"nodes": {"a": {"fn": "f", "cache": True}}}, "node 'a': cache: expected an integer from 0, got True"),
        ({"edges": "a -> b"}, "edges: expected a list of strings such as 'a.0 -> b.1', got 'a -> b'"),
        ({"edges": ["a"]}, "edges: expected a string such as 'a.0 -> b.1', got 'a'"),
        ({"edges": [1]}, "edges: expected a string such as 'a.0 -> b.1', got 1"),
        ({"edges": ["a -> "]}, f"edge 'a -> ': {END}, got ' '"),
        (
            {"edges": ["a -> b.1 -> c"]},
            "edge 'a -> b.1 -> c': expected names of nodes with one input and one output in the middle of a chain",
        ),
        ({"inputs": []}, "inputs: expected a table, got []"),
        ({"inputs": {"x": 1}}, "inputs: 'x': expected a string or a list of strings, got 1"),
        ({"inputs": {"x": [1]}}, f"inputs: 'x': {END}, got 1"),
        ({"inputs": {"x": {}}}, "inputs: 'x': expected the keys to and size, got none"),
        ({"inputs": {"x": {"size": 1}}}, "inputs: 'x': expected the keys to and size, got size"),
        ({"inputs": {"x": {"to": "a", "b": 1}}}, "inputs: 'x': expected the keys to and size, got to, b"),
        ({"inputs": {"x": {"to": "a", "size": -1}}}, "inputs: 'x': expected an integer from 0, got -1"),
        ({"outputs": 1}, "outputs: expected a string or a list of strings, got 1"),
        ({"outputs": [""]}, f"outputs: {END}, got ''"),
        ({"outputs": {"y": 1}}, f"outputs: 'y': {END}, got 1"),
        ({"bind": [1]}, "bind: expected a table, got [1]"),
        ({"bind": {"": 1}}, f"bind: {END}, got ''"),
    ],
)
def test_errors_name_the_key(table: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_document(table)
    assert caught.value.message == message
