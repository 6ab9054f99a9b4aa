"""The requests that are sent to Triton."""

import atexit
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2

from benchmarks.side_by_side.cases import Case, Http, Pause, Rpc, Step, binary, infer_message, packed, post, tensor
from benchmarks.side_by_side.triton.sequences import sequence_cases

VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False, True],
    "UINT8": [0, 1, 255],
    "UINT16": [0, 1, 65535],
    "UINT32": [0, 1, 2**32 - 1],
    "UINT64": [0, 2**53 + 1, 2**64 - 1],
    "INT8": [-128, 0, 127],
    "INT16": [-32768, 0, 32767],
    "INT32": [-(2**31), 0, 2**31 - 1],
    "INT64": [-(2**63), 2**53 + 1, 2**63 - 1],
    "FP16": [0.5, -2.0, 65504.0],
    "FP32": [0.5, -2.0, 3.0e38],
    "FP64": [0.1, -2.0, 1e300],
    "BYTES": ["", "ab", "ä€"],
}
PAIR = tensor("X", "FP32", [1, 2], [1.5, -2.0])
FREE = tensor("X", "FP32", [3], [1.5, -2.0, 3.0])
INTS = tensor("A", "INT32", [1, 4], [1, 2, 3, 4]), tensor("B", "INT32", [1, 4], [10, 10, 10, 40])
FLAT = tensor("X", "FP32", [2], [1.5, -2.0])
RAISED = (
    *("exception", "exit", "cancelled", "interrupt", "generator", "base", "empty message", "stop", "model exception"),
    *("none", "number", "element none", "element text", "too many", "too few", "error", "wrong datatype"),
    *("wrong shape", "wrong name", "no output", "code INVALID_ARG", "code NOT_FOUND", "code UNAVAILABLE"),
    *("code UNSUPPORTED", "code ALREADY_EXISTS", "code CANCELLED", "code UNKNOWN", "fine"),
)
SCRIPTS = {
    "two responses": '[0, 1, "final"]',
    "no response": '["final"]',
    "one response": '[7, "final"]',
    "an error between": '[0, "error", 3, "final"]',
    "an error first": '["error", 3, "final"]',
    "a final error": '[0, "final error"]',
    "only a final error": '["final error"]',
    "a final response with content": "[0, [5]]",
}


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for group, pairs in (("rest", _rest()), ("grpc", _grpc())):
        for title, steps in pairs:
            yield Case(group, f"{group} {title}", [steps] if isinstance(steps, Http | Rpc | Pause) else list(steps))
    yield from sequence_cases()


Named = Iterator[tuple[str, Step | Sequence[Step]]]


def infer(model: str, *inputs: Mapping[str, Any], version: str = "", **fields: Any) -> Http:
    """Return an inference request as JSON."""
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
    return post(f"{path}/infer", {"inputs": list(inputs), **fields})


def call(model: str, *inputs: Mapping[str, Any], version: str = "", raw: Sequence[bytes] = (), **fields: Any) -> Rpc:
    """Return an inference call."""
    return Rpc("ModelInfer", [infer_message(model, {"inputs": list(inputs), **fields}, version, raw)])


def stream(model: str, *bodies: Mapping[str, Any]) -> Rpc:
    """Return a stream of inference requests."""
    return Rpc("ModelStreamInfer", [infer_message(model, body) for body in bodies])


def _get(path: str) -> Http:
    return Http(path, "GET")


# --- REST ----------------------------------------------------------------------------------------------------------


def _rest() -> Named:
    for part in (_rest_server, _rest_datatypes, _rest_shapes, _rest_outputs, _rest_parameters, _rest_invalid):
        yield from part()
    for part in (_rest_raises, _rest_generate, _rest_repository):
        yield from part()


def _rest_server() -> Named:
    for path in (
        *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/batch", "/v2/models/batch/ready"),
        *("/v2/models/versions", "/v2/models/versions/versions/3", "/v2/models/versions/versions/2"),
        *("/v2/models/versions/versions/1/ready", "/v2/models/versions/versions/9/ready", "/v2/models/nope"),
        *("/v2/models/nope/ready", "/v2/models/batch/versions/abc", "/v2/models/decoupled", "/v2/models/ensemble"),
        *("/v2/models/types", "/v2/models/direct", "/v2/models/broken", "/v2/models/broken/ready", "/v2/nope"),
        *("/v2/models/nope/config", "/v2/models/nope/stats", "/v2/models/batch/versions/1/config"),
        *("/v2/models/optional", "/v2/models/reshaped", "/v2/models/batch/"),
    ):
        yield f"GET {path}", _get(path)
    for name in (
        *("batch", "addsub", "direct", "oldest", "ensemble", "decoupled", "queued", "versions", "reshaped", "optional"),
        "idle",
    ):
        yield f"config of {name}", _get(f"/v2/models/{name}/config")
    for method in ("PUT", "DELETE", "GET"):
        yield f"{method} of infer", Http("/v2/models/batch/infer", method)
    yield "POST of metadata", post("/v2/models/batch", "")
    yield "POST of the index, ready ones", post("/v2/repository/index", {"ready": True})
    yield "POST of the index without a body", post("/v2/repository/index", "")
    yield "GET of the index", _get("/v2/repository/index")


def _rest_datatypes() -> Named:
    for kind, values in VALUES.items():
        path, size = "/v2/models/types/infer", len(packed(kind, values))
        yield (
            f"{kind} as JSON",
            infer("types", tensor(f"X_{kind}", kind, [3], values))
            if kind != "FP16"
            else infer("types", tensor("X_FP16", "FP16", [3], values)),
        )
        body = {
            "inputs": [{"name": f"X_{kind}", "datatype": kind, "shape": [3], "parameters": {"binary_data_size": size}}],
            "outputs": [{"name": f"Y_{kind}", "parameters": {"binary_data": True}}],
        }
        yield f"{kind} as binary", binary(path, body, packed(kind, values))
    yield "BF16 to a model without it", infer("free", tensor("X", "BF16", [1], [1.0]))
    for name, value in (("nan", "NaN"), ("infinity", "Infinity")):
        yield (
            f"{name} in JSON",
            post(
                "/v2/models/free/infer",
                f'{{"inputs": [{{"name": "X", "datatype": "FP32", "shape": [1], "data": [{value}]}}]}}',
            ),
        )
    yield (
        "NaN in binary data",
        binary(
            "/v2/models/free/infer",
            {
                "inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}],
                "parameters": {"binary_data_output": True},
            },
            packed("FP32", [float("nan"), float("inf")]),
        ),
    )
    for title, kind, data in (
        ("256 as UINT8", "UINT8", [256]),
        ("-1 as UINT32", "UINT32", [-1]),
        ("128 as INT8", "INT8", [128]),
        ("2^31 as INT32", "INT32", [2**31]),
        ("2^63 as INT64", "INT64", [2**63]),
        ("1.5 as INT32", "INT32", [1.5]),
        ("1.0 as INT32", "INT32", [1.0]),
        ("text as INT32", "INT32", ["1"]),
        ("true as INT32", "INT32", [True]),
        ("1 as BOOL", "BOOL", [1]),
        ("null as FP32", "FP32", [None]),
        ("1e39 as FP32", "FP32", [1e39]),
        ("1 as FP64", "FP64", [1]),
        ("1 as BYTES", "BYTES", [1]),
        ("null as BYTES", "BYTES", [None]),
    ):
        yield title, infer("types", tensor(f"X_{kind}", kind, [1], data))


def _rest_shapes() -> Named:
    nested = [[1, 2], [3, 4]]
    yield "nested data", infer("matrix", tensor("X", "INT32", [2, 2], nested))
    yield "flat data", infer("matrix", tensor("X", "INT32", [2, 2], [1, 2, 3, 4]))
    yield "data nested otherwise", infer("matrix", tensor("X", "INT32", [2, 2], [[1, 2, 3, 4]]))
    yield "uneven nesting", infer("matrix", tensor("X", "INT32", [2, 2], [[1, 2, 3], [4]]))
    yield "no rows", infer("matrix", tensor("X", "INT32", [0, 2], []))
    yield "an empty vector", infer("free", tensor("X", "FP32", [0], []))
    for size in (1, 2, 4, 5, 0):
        yield f"a batch of {size}", infer("batch", tensor("X", "FP32", [size, 2], list(range(2 * size))))
    for title, shape, count in (
        ("no batch axis", [2], 2),
        ("wrong width", [1, 3], 3),
        ("an axis too many", [1, 1, 2], 2),
        ("an axis of -1", [-1, 2], 2),
        ("no axes", [], 1),
        ("more data than the shape", [1, 2], 3),
        ("less data than the shape", [1, 2], 1),
        ("a huge shape", [2**40, 2], 2),
    ):
        yield title, infer("batch", tensor("X", "FP32", shape, [1] * count))
    yield "a shape of text", infer("free", {"name": "X", "datatype": "FP32", "shape": ["3"], "data": [1, 2, 3]})
    yield "a shape of floats", infer("free", {"name": "X", "datatype": "FP32", "shape": [3.0], "data": [1, 2, 3]})
    yield "reshape", infer("reshaped", tensor("X", "FP32", [2, 1], [1, 2]))
    yield "two inputs", infer("addsub", *INTS)
    yield "two inputs of different batches", infer("addsub", INTS[0], tensor("B", "INT32", [2, 4], [1] * 8))
    yield "inputs in another order", infer("addsub", INTS[1], INTS[0])
    yield "an ensemble", infer("ensemble", *INTS)
    yield "an ensemble, one output", infer("ensemble", *INTS, outputs=[{"name": "S"}])
    yield "an ensemble, a missing input", infer("ensemble", INTS[0])
    yield "an optional input left out", infer("optional", FLAT)
    yield "an optional input", infer("optional", FLAT, tensor("SCALE", "FP32", [2], [2, 3]))
    yield "only the optional input", infer("optional", tensor("SCALE", "FP32", [2], [2, 3]))
    yield "a call of another model", infer("bls", FREE)
    yield "version 1", infer("versions", FREE, version="1")
    yield "version 3 by default", infer("versions", FREE)
    yield "version 2, which is not served", infer("versions", FREE, version="2")
    yield "version abc", infer("versions", FREE, version="abc")


def _rest_outputs() -> Named:
    for title, outputs in (
        ("one output", [{"name": "SUM"}]),
        ("outputs in another order", [{"name": "DIFFERENCE"}, {"name": "SUM"}]),
        ("an output twice", [{"name": "SUM"}, {"name": "SUM"}]),
        ("an unknown output", [{"name": "nope"}]),
        ("an output without name", [{}]),
        ("no outputs", []),
        ("top 2 classes with labels", [{"name": "SUM", "parameters": {"classification": 2}}]),
        ("top 2 classes without labels", [{"name": "DIFFERENCE", "parameters": {"classification": 2}}]),
        ("more classes than elements", [{"name": "SUM", "parameters": {"classification": 9}}]),
        ("0 classes", [{"name": "SUM", "parameters": {"classification": 0}}]),
        ("-1 classes", [{"name": "SUM", "parameters": {"classification": -1}}]),
        ("classes as text", [{"name": "SUM", "parameters": {"classification": "2"}}]),
        ("classes as binary", [{"name": "SUM", "parameters": {"classification": 1, "binary_data": True}}]),
        ("one output as binary", [{"name": "SUM", "parameters": {"binary_data": True}}, {"name": "DIFFERENCE"}]),
        ("binary_data as text", [{"name": "SUM", "parameters": {"binary_data": "true"}}]),
        ("an unknown parameter of an output", [{"name": "SUM", "parameters": {"nope": 1}}]),
        ("outputs as an object", {"name": "SUM"}),
        (
            "a shared memory region that is unknown",
            [{"name": "SUM", "parameters": {"shared_memory_region": "nope", "shared_memory_byte_size": 16}}],
        ),
    ):
        yield title, infer("addsub", *INTS, outputs=outputs)
    yield "all outputs as binary", infer("addsub", *INTS, parameters={"binary_data_output": True})
    yield (
        "all outputs as binary but one",
        infer(
            "addsub",
            *INTS,
            parameters={"binary_data_output": True},
            outputs=[{"name": "SUM"}, {"name": "DIFFERENCE", "parameters": {"binary_data": False}}],
        ),
    )
    yield (
        "classes of two rows",
        infer(
            "addsub",
            tensor("A", "INT32", [2, 4], [1, 2, 3, 4, 8, 7, 6, 5]),
            tensor("B", "INT32", [2, 4], [0] * 8),
            outputs=[{"name": "SUM", "parameters": {"classification": 3}}],
        ),
    )


def _rest_parameters() -> Named:
    for title, parameters in (
        ("no parameters", {}),
        ("text, integer and boolean", {"a": "x", "b": 3, "c": True}),
        ("a float", {"a": 1.5}),
        ("a negative integer", {"a": -1}),
        ("2^63", {"a": 2**63}),
        ("2^64", {"a": 2**64}),
        ("null", {"a": None}),
        ("a list", {"a": [1]}),
        ("an object", {"a": {"b": 1}}),
        ("timeout 30", {"timeout": 30}),
        ("timeout as text", {"timeout": "30"}),
        ("timeout -1", {"timeout": -1}),
        ("priority 1", {"priority": 1}),
        ("priority as text", {"priority": "1"}),
        ("priority -1", {"priority": -1}),
        ("triton_ reserved", {"triton_nope": 1}),
        ("triton_enable_empty_final_response", {"triton_enable_empty_final_response": True}),
        ("sequence_id to a model without sequences", {"sequence_id": 5, "sequence_start": True}),
        ("sequence_start as text", {"sequence_id": 5, "sequence_start": "true"}),
        ("headers", {"headers": 1}),
        ("binary_data_output as text", {"binary_data_output": "true"}),
        ("an empty name", {"": 1}),
    ):
        yield f"parameters: {title}", infer("report", FLAT, parameters=parameters)
    yield "parameters: a list instead of an object", infer("report", FLAT, parameters=[1])
    yield "id", infer("report", FLAT, id="a-1")
    yield "an empty id", infer("report", FLAT, id="")
    yield "id as a number", infer("report", FLAT, id=5)
    yield "id of other letters", infer("report", FLAT, id="ä 1")
    yield "an unknown field of the request", infer("report", FLAT, nope=1)
    yield "an unknown parameter of an input", infer("report", tensor("X", "FP32", [2], [1, 2], nope=1))
    for value in (30, 60, 1):
        yield f"timeout {value}, a model that sleeps", infer("sleep", PAIR, parameters={"timeout": value})
    for value in (0, 1, 2, 3):
        yield f"priority {value} of 2", infer("queued", PAIR, parameters={"priority": value})


def _rest_invalid() -> Named:
    good = '{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}'
    path = "/v2/models/free/infer"
    for title, body in (
        ("an empty body", ""),
        ("no JSON", "{"),
        ("text after the JSON", good + "x"),
        ("a list", "[]"),
        ("null", "null"),
        ("no inputs field", "{}"),
        ("no inputs", '{"inputs": []}'),
        ("inputs as an object", '{"inputs": {}}'),
        ("an input that is a number", '{"inputs": [1]}'),
        ("bytes that are not UTF-8", b'{"inputs": [{"name": "\xff"}]}'),
        ("a key twice", good.replace('"data": [1]', '"data": [2], "data": [1]')),
        ("NUL in a name", good.replace('"X"', '"X\\u0000"')),
        ("deep nesting", good.replace("[1]}", "[" * 300 + "1" + "]" * 300 + "}")),
    ):
        yield title, post(path, body)
    whole = {"name": "X", "datatype": "FP32", "shape": [1], "data": [1.0]}
    for name in whole:
        rest = {key: value for key, value in whole.items() if key != name}
        yield f"an input without {name}", infer("free", rest)
        yield f"an input with {name} null", infer("free", {**whole, name: None})
    yield "an unknown input", infer("free", FREE, tensor("Z", "FP32", [1], [1]))
    yield "an input twice", infer("free", FREE, FREE)
    yield "an unknown datatype", infer("free", tensor("X", "FP31", [1], [1]))
    yield "another datatype", infer("free", tensor("X", "FP64", [1], [1]))
    yield "a datatype in small letters", infer("free", tensor("X", "fp32", [1], [1]))
    yield "a missing input", infer("addsub", INTS[0])
    yield "an unknown model", infer("nope", FREE)
    yield "a model that did not load", infer("broken", FREE)
    header = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]}
    raw = packed("FP32", [1, 2])
    yield "binary: too few bytes", binary(path, header, raw[:4])
    yield "binary: too many bytes", binary(path, header, raw, b"xx")
    yield "binary: a length of the header that is too large", binary(path, header, raw, length=9999)
    yield "binary: a length of the header that is too small", binary(path, header, raw, length=5)
    yield "binary: a negative length of the header", binary(path, header, raw, length=-1)
    short = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 4}}]}
    yield "binary: a size that does not fit the shape", binary(path, short, raw[:4])
    both = {"inputs": [{**header["inputs"][0], "data": [1, 2]}]}
    yield "binary: data and binary_data_size", binary(path, both, raw)
    text = {"inputs": [{"name": "X_BYTES", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}]}
    yield "binary: a length of an element beyond the data", binary("/v2/models/types/infer", text, b"\x09\0\0\0a")
    yield (
        "binary: raw bytes without a JSON part",
        Http(path, "POST", packed("FP32", [1, 2, 3]), {"inference-header-content-length": "0"}),
    )
    yield (
        "shared memory: an unknown region",
        infer(
            "free",
            {
                "name": "X",
                "datatype": "FP32",
                "shape": [1],
                "parameters": {"shared_memory_region": "nope", "shared_memory_byte_size": 4},
            },
        ),
    )
    yield "shared memory: status", _get("/v2/systemsharedmemory/status")
    yield "shared memory: unregister all", post("/v2/systemsharedmemory/unregister", "")
    yield "shared memory: unregister an unknown region", post("/v2/systemsharedmemory/region/nope/unregister", "")
    region = "/v2/systemsharedmemory/region/twice"
    register = post(f"{region}/register", {"key": _region_key(), "offset": 0, "byte_size": 64})
    yield "shared memory: register a region twice", [register, register, post(f"{region}/unregister", "")]


def _rest_raises() -> Named:
    fine = infer("raises", tensor("TEXT", "BYTES", [1], ["fine"]))
    for kind in RAISED:
        yield f"a model: {kind}", [infer("raises", tensor("TEXT", "BYTES", [1], [kind])), fine]


def _rest_generate() -> Named:
    for name, script in SCRIPTS.items():
        yield f"generate_stream: {name}", post("/v2/models/decoupled/generate_stream", {"TEXT": script})
    for name in ("one response", "two responses", "no response", "only a final error"):
        yield f"generate: {name}", post("/v2/models/decoupled/generate", {"TEXT": SCRIPTS[name]})
    yield "infer of a decoupled model", infer("decoupled", tensor("TEXT", "BYTES", [1], ['[7, "final"]']))
    yield "generate of a plain model", post("/v2/models/raises/generate", {"TEXT": "fine"})
    yield "generate_stream of a plain model", post("/v2/models/raises/generate_stream", {"TEXT": "fine"})
    yield "generate without an input", post("/v2/models/raises/generate", {})
    yield "generate with an unknown field", post("/v2/models/raises/generate", {"TEXT": "fine", "nope": 1})
    yield "generate with an id", post("/v2/models/raises/generate", {"id": "g", "TEXT": "fine"})
    yield "generate of numbers", post("/v2/models/free/generate", {"X": [1, 2]})
    yield "generate of one number", post("/v2/models/free/generate", {"X": 1})
    yield "generate of text for numbers", post("/v2/models/free/generate", {"X": "a"})
    yield "generate of an unknown model", post("/v2/models/nope/generate", {"X": 1})


def _rest_repository() -> Named:
    def change(name: str, verb: str, body: Any = "") -> Http:
        return post(f"/v2/repository/models/{name}/{verb}", body)

    ready, meta = _get("/v2/models/lazy/ready"), _get("/v2/models/lazy")
    yield "unload and load", [change("lazy", "unload"), Pause(0.5), ready, meta, change("lazy", "load"), ready, meta]
    yield "unload twice", [change("lazy", "unload"), Pause(0.5), change("lazy", "unload"), change("lazy", "load")]
    yield "load twice", [change("lazy", "load"), change("lazy", "load"), ready]
    yield (
        "infer of an unloaded model",
        [
            change("lazy", "unload"),
            Pause(0.5),
            infer("lazy", FREE),
            change("lazy", "load"),
            infer("lazy", FREE),
        ],
    )
    yield "unload of an unknown model", change("nope", "unload")
    yield "load of an unknown model", change("nope", "load")
    yield "load of a model that fails", change("broken", "load")
    yield (
        "unload with unload_dependents",
        [
            change("lazy", "unload", {"parameters": {"unload_dependents": True}}),
            Pause(0.5),
            ready,
            change("lazy", "load"),
        ],
    )
    for title, body in (
        ("an unknown key", {"parameters": {"nope": "x"}}),
        ("config of no JSON", {"parameters": {"config": "{"}}),
        ("config as an object", {"parameters": {"config": {"max_batch_size": 2}}}),
        ("config with an unknown field", {"parameters": {"config": '{"nope": 1}'}}),
        ("a file without config", {"parameters": {"file:1/model.py": "eA=="}}),
        ("no JSON", "{"),
        ("a list", "[]"),
        ("parameters as a list", {"parameters": []}),
        ("an empty object", {}),
    ):
        yield f"load with {title}", [change("lazy", "load", body), ready]
    yield (
        "unload with an unknown key",
        [
            change("lazy", "unload", {"parameters": {"nope": "x"}}),
            change("lazy", "load"),
        ],
    )
    reload: list[Step] = [change("counted", "unload"), Pause(0.5), change("counted", "load")]
    yield (
        "statistics",
        [
            *reload,
            infer("counted", PAIR),
            infer("counted", tensor("X", "FP32", [3, 2], [1] * 6)),
            infer("counted", tensor("X", "FP32", [1, 3], [1] * 3)),
            _get("/v2/models/counted/stats"),
            _get("/v2/models/counted/versions/1/stats"),
        ],
    )


# --- gRPC ----------------------------------------------------------------------------------------------------------


def _grpc() -> Named:
    for part in (
        _grpc_server,
        _grpc_datatypes,
        _grpc_invalid,
        _grpc_parameters,
        _grpc_streams,
        _grpc_regions,
        _grpc_repository,
    ):
        yield from part()


def _grpc_server() -> Named:
    for method, name in (
        ("ServerLive", "ServerLive"),
        ("ServerReady", "ServerReady"),
        ("ServerMetadata", "ServerMetadata"),
        ("RepositoryIndex", "RepositoryIndex"),
    ):
        yield method, Rpc(method, [getattr(service_pb2, f"{name}Request")()])
    for name, version in (
        *(("batch", ""), ("versions", ""), ("versions", "3"), ("versions", "2"), ("versions", "abc"), ("nope", "")),
        *(("decoupled", ""), ("ensemble", ""), ("direct", ""), ("broken", ""), ("", "")),
    ):
        title = f"{name or '(empty)'}{' version ' + version if version else ''}"
        yield f"ModelReady {title}", Rpc("ModelReady", [service_pb2.ModelReadyRequest(name=name, version=version)])
        yield (
            f"ModelMetadata {title}",
            Rpc("ModelMetadata", [service_pb2.ModelMetadataRequest(name=name, version=version)]),
        )
    for name in ("batch", "addsub", "oldest", "ensemble", "decoupled", "queued", "nope"):
        yield f"ModelConfig {name}", Rpc("ModelConfig", [service_pb2.ModelConfigRequest(name=name)])
    yield (
        "ModelStatistics of an unknown model",
        Rpc("ModelStatistics", [service_pb2.ModelStatisticsRequest(name="nope")]),
    )


def _grpc_datatypes() -> Named:
    for kind, values in VALUES.items():
        one = {"name": f"X_{kind}", "datatype": kind, "shape": [3]}
        if kind != "FP16":
            yield f"{kind} as contents", call("types", {**one, "data": values})
        yield f"{kind} as raw contents", call("types", one, raw=[packed(kind, values)])
    yield "a batch of 3", call("batch", tensor("X", "FP32", [3, 2], [1, 2, 3, 4, 5, 6]))
    yield "a batch of 5 of 4", call("batch", tensor("X", "FP32", [5, 2], [1] * 10))
    yield "no rows", call("matrix", {"name": "X", "datatype": "INT32", "shape": [0, 2]}, raw=[b""])
    yield "two inputs", call("addsub", *INTS)
    yield "an ensemble", call("ensemble", *INTS)
    yield "an optional input left out", call("optional", FLAT)
    yield "a call of another model", call("bls", FREE)
    yield "one output", call("addsub", *INTS, outputs=[{"name": "SUM"}])
    yield "outputs in another order", call("addsub", *INTS, outputs=[{"name": "DIFFERENCE"}, {"name": "SUM"}])
    yield "classes", call("addsub", *INTS, outputs=[{"name": "SUM", "parameters": {"classification": 2}}])
    yield "-1 classes", call("addsub", *INTS, outputs=[{"name": "SUM", "parameters": {"classification": -1}}])
    yield "an unknown output", call("addsub", *INTS, outputs=[{"name": "nope"}])
    yield (
        "binary_data of an output",
        call("addsub", *INTS, outputs=[{"name": "SUM", "parameters": {"binary_data": True}}]),
    )
    yield "version 1", call("versions", FREE, version="1")
    yield "version 2, which is not served", call("versions", FREE, version="2")
    yield "version abc", call("versions", FREE, version="abc")
    yield "id", call("report", FLAT, id="a-1")


def _grpc_invalid() -> Named:
    one = {"name": "X", "datatype": "FP32", "shape": [2]}
    raw = packed("FP32", [1, 2])
    yield "an unknown model", call("nope", FREE)
    yield "a model that did not load", call("broken", FREE)
    yield "no inputs", call("free")
    yield "an unknown input", call("free", FREE, tensor("Z", "FP32", [1], [1]))
    yield "an input twice", call("free", FREE, FREE)
    yield "a missing input", call("addsub", INTS[0])
    yield "another datatype", call("free", tensor("X", "FP64", [1], [1]))
    yield "an unknown datatype", call("free", {"name": "X", "datatype": "FP31", "shape": [2]}, raw=[raw])
    yield "wrong width", call("batch", tensor("X", "FP32", [1, 3], [1, 2, 3]))
    yield "an axis of -1", call("batch", tensor("X", "FP32", [-1, 2], [1, 2]))
    yield "more contents than the shape", call("free", tensor("X", "FP32", [1], [1, 2]))
    yield "less contents than the shape", call("free", tensor("X", "FP32", [3], [1, 2]))
    yield "no contents", call("free", one)
    yield "contents of another type", call("free", {**one, "datatype": "INT64", "data": [1, 2]})
    yield "raw contents that are too short", call("free", one, raw=[raw[:4]])
    yield "raw contents that are too long", call("free", one, raw=[raw + raw])
    yield "more raw contents than inputs", call("free", one, raw=[raw, raw])
    yield "contents and raw contents", call("free", {**one, "data": [1, 2]}, raw=[raw])
    yield (
        "two inputs, one raw content",
        call("addsub", *(dict(each, data=None) for each in INTS), raw=[packed("INT32", [1] * 4)]),
    )
    for kind in RAISED:
        yield f"a model: {kind}", call("raises", tensor("TEXT", "BYTES", [1], [kind]))


def _grpc_parameters() -> Named:
    for title, parameters in (
        ("text, integer and boolean", {"a": "x", "b": 3, "c": True}),
        ("a float", {"a": 1.5}),
        ("2^63", {"a": 2**63}),
        ("timeout 30", {"timeout": 30}),
        ("timeout as text", {"timeout": "30"}),
        ("timeout -1", {"timeout": -1}),
        ("priority 1", {"priority": 1}),
        ("priority as text", {"priority": "1"}),
        ("triton_ reserved", {"triton_nope": 1}),
        ("headers", {"headers": 1}),
        ("sequence_id to a model without sequences", {"sequence_id": 5, "sequence_start": True}),
    ):
        yield f"parameters: {title}", call("report", FLAT, parameters=parameters)
    yield "parameters: without a value", _without_value()
    yield "timeout 30, a model that sleeps", call("sleep", PAIR, parameters={"timeout": 30})
    yield "priority 3 of 2", call("queued", PAIR, parameters={"priority": 3})


def _region_key() -> str:
    """Return the key of 64 bytes of shared memory, which both servers can open until this process ends."""
    path = Path("/dev/shm/dragoman-side-by-side")
    path.write_bytes(bytes(64))
    atexit.register(path.unlink, missing_ok=True)
    return f"/{path.name}"


def _without_value() -> Rpc:
    message = infer_message("report", {"inputs": [FLAT]})
    message.parameters["a"].SetInParent()
    return Rpc("ModelInfer", [message])


def _grpc_streams() -> Named:
    def body(script: str, **parameters: Any) -> dict[str, Any]:
        return {"id": "s", "inputs": [tensor("TEXT", "BYTES", [1], [script])], "parameters": parameters}

    for name, script in SCRIPTS.items():
        yield f"stream: {name}", stream("decoupled", body(script))
        yield (
            f"stream with final markers: {name}",
            stream("decoupled", body(script, triton_enable_empty_final_response=True)),
        )
    yield "stream: a model that raises", stream("decoupled", body('[0, "raise"]'))
    yield "stream: a plain model", stream("free", {"inputs": [FREE]}, {"inputs": [FREE]})
    yield (
        "stream with final markers: a plain model",
        stream("free", {"inputs": [FREE], "parameters": {"triton_enable_empty_final_response": True}}),
    )
    yield "stream: an unknown model", stream("nope", {"inputs": [FREE]})
    yield (
        "stream: a wrong request, then a good one",
        stream("free", {"inputs": [tensor("X", "FP64", [1], [1])]}, {"inputs": [FREE]}),
    )
    yield "stream: no requests", Rpc("ModelStreamInfer", [])
    yield "an unary call of a decoupled model", call("decoupled", tensor("TEXT", "BYTES", [1], ['[7, "final"]']))


def _grpc_regions() -> Named:
    register = Rpc(
        "SystemSharedMemoryRegister",
        [service_pb2.SystemSharedMemoryRegisterRequest(name="twice", key=_region_key(), byte_size=64)],
    )
    unregister = Rpc("SystemSharedMemoryUnregister", [service_pb2.SystemSharedMemoryUnregisterRequest(name="twice")])
    unknown = Rpc("SystemSharedMemoryStatus", [service_pb2.SystemSharedMemoryStatusRequest(name="nope")])
    yield "shared memory: register a region twice", [register, register, unregister, unregister]
    yield "shared memory: status of an unknown region", unknown


def _grpc_repository() -> Named:
    def change(verb: str, name: str, **parameters: Any) -> Rpc:
        message = getattr(service_pb2, f"RepositoryModel{verb}Request")(model_name=name)
        for key, value in parameters.items():
            setattr(message.parameters[key], "bool_param" if isinstance(value, bool) else "string_param", value)
        return Rpc(f"RepositoryModel{verb}", [message])

    ready = Rpc("ModelReady", [service_pb2.ModelReadyRequest(name="lazy")])
    yield "unload and load", [change("Unload", "lazy"), Pause(0.5), ready, change("Load", "lazy"), ready]
    yield "unload of an unknown model", change("Unload", "nope")
    yield "load of an unknown model", change("Load", "nope")
    yield "load of a model that fails", change("Load", "broken")
    yield "load with an unknown key", [change("Load", "lazy", nope="x"), ready]
    yield "load with a config of no JSON", [change("Load", "lazy", config="{"), ready]
    yield "load with a config that is no text", [change("Load", "lazy", config=True), ready]
    yield "unload with an unknown key", [change("Unload", "lazy", nope="x"), change("Load", "lazy")]
    counted = service_pb2.ModelStatisticsRequest(name="counted")
    yield (
        "statistics",
        [
            change("Unload", "counted"),
            Pause(0.5),
            change("Load", "counted"),
            call("counted", PAIR),
            Rpc("ModelStatistics", [counted]),
        ],
    )
