"""UM-Bridge on the wire: exact bodies, and every invalid input over one connection."""

import http.client
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.server_process import ServerProcess

POINT = [[1.0, 2.0], [3.0, 4.0, 5.0]]
GRADIENT = {"name": "forward", "outWrt": 0, "inWrt": 0, "input": POINT, "sens": [1.0, 1.0]}
JACOBIAN = {"name": "forward", "outWrt": 0, "inWrt": 0, "input": POINT, "vec": [1.0, 1.0]}
HESSIAN = {
    "name": "forward",
    "outWrt": 0,
    "inWrt1": 0,
    "inWrt2": 1,
    "input": POINT,
    "sens": [1.0, 1.0],
    "vec": [1.0, 1.0, 1.0],
}


class Connection:
    """One persistent connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._socket: Any = None

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request(method, path, sent, {k.replace("_", "-"): v for k, v in headers.items()})
        response = self._connection.getresponse()
        text = response.read()
        return response.status, text, {k.lower(): v for k, v in response.getheaders()}

    def is_usable(self) -> bool:
        """Return whether this connection still gets responses."""
        before = self._connection.sock
        right = self.request("POST", "/Evaluate", {"name": "forward", "input": POINT})[:2]
        return (
            before is not None and self._connection.sock is before and right == (200, b'{"output":[[1.0,4.0],[53.0]]}')
        )

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def wire(simulators: ServerProcess) -> Iterator[Connection]:
    connection = Connection(simulators.http_port)
    connection.request("GET", "/Info")
    yield connection
    connection.close()


@pytest.mark.parametrize(
    ("path", "body", "reply_body"),
    [
        (
            "/ModelInfo",
            {"name": "Double"},
            {"support": {"Evaluate": True, "Gradient": False, "ApplyJacobian": False, "ApplyHessian": False}},
        ),
        (
            "/ModelInfo",
            {"name": "shout"},
            {"support": {"Evaluate": False, "Gradient": False, "ApplyJacobian": False, "ApplyHessian": False}},
        ),
        ("/InputSizes", {"name": "forward"}, {"inputSizes": [2, 3]}),
        ("/InputSizes", {"name": "forward", "config": {"n": 7}}, {"inputSizes": [7, 3]}),
        ("/OutputSizes", {"name": "Points", "config": {}}, {"outputSizes": [1, 2]}),
        ("/OutputSizes", {"name": "forward", "config": None}, {"outputSizes": [2, 1]}),
        ("/Evaluate", {"name": "Points", "input": [[1, 2]]}, {"output": [[5.0], [2.0, 4.0]]}),
        ("/Evaluate", {"name": "Faulty", "input": [[8]]}, {"output": [[1.0, 2.0]]}),
        ("/Gradient", GRADIENT, {"output": [2.0, 4.0]}),
        ("/Gradient", {**GRADIENT, "name": "Points", "input": [[3, 4]], "sens": [2]}, {"output": [12.0, 16.0]}),
        ("/ApplyJacobian", JACOBIAN, {"output": [2.0, 4.0]}),
        ("/ApplyHessian", HESSIAN, {"output": [0.0, 0.0]}),
    ],
)
def test_bodies_have_exactly_these_keys(wire: Connection, path: str, body: Any, reply_body: Any) -> None:
    status, text, headers = wire.request("POST", path, body)
    assert (status, json.loads(text)) == (200, reply_body)
    assert headers["content-type"] == "application/json"


def test_the_version_is_a_number(wire: Connection) -> None:
    status, text, _ = wire.request("GET", "/Info")
    assert status == 200
    assert text.startswith(b'{"protocolVersion":1.0,"models":["Double",')


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/octet-stream"])
def test_any_content_type_is_accepted(wire: Connection, kind: str) -> None:
    body = {"name": "forward", "input": POINT}
    assert wire.request("POST", "/Evaluate", body, Content_Type=kind)[:2] == (200, b'{"output":[[1.0,4.0],[53.0]]}')


def test_operations_beyond_the_protocol(wire: Connection) -> None:
    assert wire.request("HEAD", "/")[0] in (200, 404, 405)
    status, text, headers = wire.request("GET", "/Evaluate")
    assert (status, headers["allow"]) == (405, "OPTIONS, POST")
    assert b"POST" in text
    assert wire.is_usable()


EVALUATE = {"name": "forward", "input": POINT}
BAD: list[tuple[str, Any, int, str, str]] = [
    # The order of the reference server: name, support, number of inputs, their lengths, outWrt, inWrt, sens, vec.
    ("/Evaluate", {"name": "x", "input": 5}, 400, "ModelNotFound", "'x'"),
    ("/ModelInfo", {"name": "x"}, 400, "ModelNotFound", "'x'"),
    ("/InputSizes", {"name": "x", "config": 5}, 400, "ModelNotFound", "'x'"),
    ("/Gradient", {"name": "x"}, 400, "ModelNotFound", "'x'"),
    ("/Evaluate", {"name": ""}, 400, "ModelNotFound", "''"),
    ("/Gradient", {"name": "Double"}, 400, "UnsupportedFeature", "Gradient not supported"),
    ("/Gradient", {**GRADIENT, "name": "Double", "input": "no"}, 400, "UnsupportedFeature", "Gradient not supported"),
    ("/ApplyHessian", {**HESSIAN, "name": "Points"}, 400, "UnsupportedFeature", "ApplyHessian not supported"),
    ("/Evaluate", {"name": "shout", "input": [[1]]}, 400, "UnsupportedFeature", "Evaluate not supported"),
    ("/Evaluate", {"name": "shout", "input": 5}, 400, "UnsupportedFeature", "Evaluate not supported"),
    ("/InputSizes", {"name": "shout"}, 400, "UnsupportedFeature", "float vectors of known sizes"),
    ("/Evaluate", {**EVALUATE, "input": [[1, 2]]}, 400, "InvalidInput", "expected 2 input vectors"),
    ("/Evaluate", {**EVALUATE, "input": [*POINT, [1]]}, 400, "InvalidInput", "got 3"),
    ("/Evaluate", {**EVALUATE, "input": []}, 400, "InvalidInput", "got 0"),
    ("/Evaluate", {**EVALUATE, "input": [[1, 2], [3, 4]]}, 400, "InvalidInput", "input 1 ('input_1'): expected 3"),
    ("/Evaluate", {**EVALUATE, "input": [[1, 2, 3], [3, 4, 5]]}, 400, "InvalidInput", "expected 2 numbers, got 3"),
    ("/Evaluate", {**EVALUATE, "config": {"n": 3}}, 400, "InvalidInput", "expected 3 numbers, got 2"),
    ("/Gradient", {**GRADIENT, "outWrt": 2, "sens": []}, 400, "InvalidInput", "outWrt"),
    ("/Gradient", {**GRADIENT, "outWrt": -1}, 400, "InvalidInput", "got -1"),
    ("/Gradient", {**GRADIENT, "inWrt": 2}, 400, "InvalidInput", "inWrt"),
    ("/Gradient", {**GRADIENT, "inWrt": -3}, 400, "InvalidInput", "got -3"),
    ("/Gradient", {**GRADIENT, "sens": [1]}, 400, "InvalidInput", "sens, for output 'output_0': expected 2"),
    ("/ApplyJacobian", {**JACOBIAN, "vec": [1, 2, 3]}, 400, "InvalidInput", "vec, for input 'input_0': expected 2"),
    ("/Gradient", {**GRADIENT, "sens": [1, math.nan]}, 400, "InvalidInput", "sens[1]: expected a finite number"),
    ("/ApplyJacobian", {**JACOBIAN, "vec": [math.inf, 1]}, 400, "InvalidInput", "vec[0]: expected a finite number"),
    ("/ApplyHessian", {**HESSIAN, "sens": [1, -math.inf]}, 400, "InvalidInput", "sens[1]: expected a finite number"),
    ("/ApplyHessian", {**HESSIAN, "vec": [1, 1, math.nan]}, 400, "InvalidInput", "vec[2]: expected a finite number"),
    ("/ApplyHessian", {**HESSIAN, "inWrt2": 5}, 400, "InvalidInput", "inWrt2"),
    ("/ApplyHessian", {**HESSIAN, "inWrt1": -1}, 400, "InvalidInput", "inWrt1"),
    ("/ApplyHessian", {**HESSIAN, "sens": [1]}, 400, "InvalidInput", "sens"),
    ("/ApplyHessian", {**HESSIAN, "vec": [1, 1]}, 400, "InvalidInput", "vec, for input 'input_1': expected 3"),
    # Kinds: the reference server hands them on to the model.
    ("/Evaluate", {**EVALUATE, "input": [["1", 2], [3, 4, 5]]}, 400, "InvalidInput", "input[0][0]: expected a number"),
    ("/Evaluate", {**EVALUATE, "input": [[1, 2], [3, None, 5]]}, 400, "InvalidInput", "input[1][1]: expected a number"),
    ("/Evaluate", {**EVALUATE, "input": [[1, True], [3, 4, 5]]}, 400, "InvalidInput", "got a boolean"),
    ("/Evaluate", {**EVALUATE, "input": [1, 2]}, 400, "InvalidInput", "input[0]: expected an array of numbers"),
    ("/Evaluate", {**EVALUATE, "input": [[[1, 2]], [3, 4, 5]]}, 400, "InvalidInput", "input[0][0]"),
    ("/Evaluate", {**EVALUATE, "input": {"x": 1}}, 400, "InvalidInput", "an array of vectors"),
    ("/Evaluate", {**EVALUATE, "input": None}, 400, "InvalidInput", "an array of vectors"),
    ("/Evaluate", {**EVALUATE, "input": [[10**400, 2], [3, 4, 5]]}, 400, "InvalidInput", "does not fit"),
    ("/Evaluate", {**EVALUATE, "config": [1]}, 400, "InvalidInput", "'config': expected an object"),
    ("/Evaluate", {"name": "forward"}, 400, "InvalidInput", "'input' is missing"),
    ("/Gradient", {k: v for k, v in GRADIENT.items() if k != "sens"}, 400, "InvalidInput", "'sens' is missing"),
    ("/Gradient", {**GRADIENT, "outWrt": "0"}, 400, "InvalidInput", "'outWrt': expected an integer, got '0'"),
    ("/Gradient", {**GRADIENT, "inWrt": 0.0}, 400, "InvalidInput", "'inWrt': expected an integer, got 0.0"),
    ("/Gradient", {**GRADIENT, "inWrt": True}, 400, "InvalidInput", "'inWrt': expected an integer, got a boolean"),
    ("/Gradient", {**GRADIENT, "inWrt": 1 << 80}, 400, "InvalidInput", "inWrt"),
    ("/Gradient", {**GRADIENT, "sens": 1.0}, 400, "InvalidInput", "'output_0': expected 2 numbers, got 1"),
    ("/Gradient", {**GRADIENT, "sens": "1"}, 400, "InvalidInput", "sens: expected an array of numbers"),
    # Bodies.
    ("/Evaluate", b"", 400, "InvalidInput", "empty"),
    ("/Evaluate", b"{", 400, "InvalidInput", "not valid JSON"),
    ("/Evaluate", b"[]", 400, "InvalidInput", "not a JSON object"),
    ("/Evaluate", b'"forward"', 400, "InvalidInput", "not a JSON object"),
    ("/Evaluate", b"null", 400, "InvalidInput", "not a JSON object"),
    ("/Evaluate", b"{}", 400, "InvalidInput", "'name' is missing"),
    ("/Evaluate", {"name": 5, "input": POINT}, 400, "InvalidInput", "'name': expected the name of a model"),
    ("/Evaluate", b'{"name": "forward", "input": [[1,2],[3,4,5]]} x', 400, "InvalidInput", "not valid JSON"),
    ("/Evaluate", b'{"name": "\xff\xfe"}', 400, "InvalidInput", "not valid JSON"),
    ("/Evaluate", b'{"name": "forward", "config": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "InvalidInput", "deep"),
    ("/Evaluate", b'{"name": "forward", "input": [' + b"[]," * 2000 + b"[]]}", 400, "InvalidInput", "vectors"),
    ("/Evaluate", b'{"name": "forward", "input": [' + b"[]," * 70000 + b"[]]}", 400, "InvalidInput", "vectors"),
    ("/Evaluate", {**EVALUATE, "input": [[0.5] * 9999, [3, 4, 5]]}, 400, "InvalidInput", "got 9999"),
    ("/Evaluate", {**EVALUATE, "input": [[0.5] * 9998 + ["x"], [3, 4, 5]]}, 400, "InvalidInput", "input[0][9998]"),
    ("/Evaluate", {**EVALUATE, "input": [[0.5] * 9998 + [[1]], [3, 4, 5]]}, 400, "InvalidInput", "input[0][9998]"),
    # The model's own faults.
    ("/Evaluate", {"name": "Faulty", "input": [[1]]}, 500, "InvalidOutput", "output 'output_0': element 1 is nan"),
    ("/Evaluate", {"name": "Faulty", "input": [[3]]}, 500, "InvalidOutput", "output 0: expected 2 numbers, got 1"),
    ("/Evaluate", {"name": "Faulty", "input": [[4]]}, 500, "InvalidOutput", "expected 1 output vectors, got 2"),
    ("/Evaluate", {"name": "Faulty", "input": [[5]]}, 500, "InvalidOutput", "expected real numbers"),
    ("/Evaluate", {"name": "Faulty", "input": [[6]]}, 500, "InvalidOutput", "expected real numbers"),
    ("/Evaluate", {"name": "Faulty", "input": [[7]]}, 500, "InvalidOutput", "expected"),
    ("/Evaluate", {"name": "Faulty", "input": [[9]]}, 500, "InvalidOutput", "expected 1 output vectors, got 2"),
    ("/Evaluate", {"name": "Faulty", "input": [[10]]}, 500, "ModelError", "ValueError: the mesh is tangled"),
    ("/Evaluate", {"name": "Faulty", "input": [[11]]}, 500, "ModelError", "KeyError"),
]


@pytest.mark.parametrize(("path", "body", "status", "kind", "message"), BAD, ids=[f"{i}" for i in range(len(BAD))])
def test_invalid_input_is_reported_and_keeps_the_connection_open(
    wire: Connection, path: str, body: Any, status: int, kind: str, message: str
) -> None:
    actual, text, headers = wire.request("POST", path, body)
    error = json.loads(text)
    assert list(error) == ["error"]
    assert (actual, error["error"]["type"]) == (status, kind), text
    assert message in error["error"]["message"]
    assert list(error["error"]) == ["type", "message"]
    assert headers["content-type"] == "application/json"
    assert wire.is_usable()


def test_nonfinite_numbers(wire: Connection) -> None:
    # Infinities are sent as 1e999, which is valid JSON, and accepted in both spellings; NaN in the result is an error.
    body = b'{"name": "Faulty", "input": [[2]]}'
    assert wire.request("POST", "/Evaluate", body)[1] == b'{"output":[[1e999,-1e999]]}'
    for spelled in (b"1e999", b"Infinity"):
        status, text, _ = wire.request(
            "POST", "/Evaluate", b'{"name": "Double", "input": [[%b,-%b,0,1]]}' % (spelled, spelled)
        )
        assert (status, text) == (200, b'{"output":[[1e999,-1e999,0.0,2.0]]}')
    status, text, _ = wire.request("POST", "/Evaluate", b'{"name": "Double", "input": [[0, NaN, 0, 0]]}')
    assert (status, json.loads(text)["error"]["type"]) == (500, "InvalidOutput")
    assert "element 1 is nan" in json.loads(text)["error"]["message"]
    assert wire.is_usable()


def test_a_vector_of_ten_million(wire: Connection) -> None:
    count = 10_000_000
    numbers = b",".join([b"1.5"] * count)
    body = b'{"name": "Double", "config": {"n": %d}, "input": [[%b]]}' % (count, numbers)
    status, text, _ = wire.request("POST", "/Evaluate", body)
    assert status == 200
    assert text == b'{"output":[[' + b",".join([b"3.0"] * count) + b"]]}"
    status, text, _ = wire.request("POST", "/Evaluate", body.replace(b"%d}" % count, b"%d}" % (count + 1)))
    assert (status, json.loads(text)["error"]["message"]) == (
        400,
        f"input 0 ('input_0'): expected {count + 1} numbers, got {count}",
    )
    assert wire.is_usable()


def test_too_large_bodies_have_the_protocols_error_format(simulators: ServerProcess) -> None:
    wire = Connection(simulators.http_port)
    status, text, _ = wire.request("POST", "/Evaluate", b" " * ((100 << 20) + 1))
    assert (status, json.loads(text)["error"]["type"]) == (413, "InvalidInput")
    wire.close()
