"""The requests that are sent to MLServer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.side_by_side.cases import Case, Http, Rpc, Step, infer_message, post, tensor


@dataclass(frozen=True, slots=True)
class _Request:
    """An inference request, or without `model` an HTTP request of `method` and `path`."""

    name: str
    model: str = ""
    body: Mapping[str, Any] | None = None
    path: str = ""
    method: str = "GET"
    protocols: Sequence[str] = ("rest", "grpc")
    headers: Mapping[str, str] = field(default_factory=dict)


IRIS = [5.1, 3.5, 1.4, 0.2, 6.7, 3.0, 5.2, 2.3]


def cases() -> Iterator[Case]:
    """Yield a case for each request and protocol."""
    for request in _requests():
        body = request.body or {}
        for protocol in request.protocols:
            title = f"{protocol} {request.model or request.method}: {request.name}"
            step: Step
            if protocol == "grpc":
                messages = [infer_message(request.model, body)]
                step = Rpc("ModelInfer", messages, request.headers, keeps_id="id" in body)
            elif request.model or request.method == "POST":
                path = request.path or f"/v2/models/{request.model}/infer"
                step = post(path, request.body, headers=request.headers, keeps_id="id" in body)
            else:
                step = Http(request.path, request.method, None, request.headers, keeps_id=False)
            yield Case(protocol, title, [step])


def _requests() -> Iterator[_Request]:
    for group in (_server, _tables, _estimators, _strings, _mlflow, _codecs, _custom, _invalid):
        yield from group()


def _server() -> Iterator[_Request]:
    rest = ("rest",)
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/sk-classifier/ready"):
        yield _Request(path, path=path, protocols=rest)
    for name in (
        "sk-metadata",
        "tagged",
        "sk-version",
        "mlf-columns",
        "mlf-tensor",
        "mlf-words",
        "describe",
        "xgb-binary",
    ):
        yield _Request(f"metadata of {name}", path=f"/v2/models/{name}", protocols=rest)
    path = "/v2/models/sk-version/versions/v2"
    yield _Request("metadata of a version", path=path, protocols=rest)
    yield _Request("readiness of a version", path="/v2/models/sk-version/versions/v2/ready", protocols=rest)
    for path in ("/v2/models/unknown", "/v2/models/unknown/ready", "/v2/models/sk-version/versions/v9"):
        yield _Request(path, path=path, protocols=rest)
    for path in ("/v2/docs", "/v2/docs/dataplane.json", "/v2/models/sk-classifier/docs"):
        yield _Request(path, path=path, protocols=rest)
    yield _Request(
        "/v2/models/unknown/docs",
        path="/v2/models/unknown/docs",
        protocols=rest,
    )


def _tables() -> Iterator[_Request]:
    """Each model of four numbers, with each datatype and form."""
    names = [
        *("sk-classifier", "sk-metadata", "sk-proba", "sk-names", "sk-scaler", "sk-version"),
        *("xgb-classes", "xgb-binary", "xgb-regressor", "xgb-booster"),
        *("lgb-regressor", "lgb-binary", "lgb-classes", "cat-classes", "cat-binary"),
    ]
    for name in names:
        yield _Request("FP32", name, {"inputs": [tensor("x", "FP32", [2, 4], IRIS)]})
        yield _Request("one row with an id", name, {"id": "r-1", "inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])]})
    rows = {"inputs": [tensor("x", "FP32", [2, 4], IRIS)]}
    yield _Request("text labels", "cat-names", rows, protocols=("rest",))
    yield _Request("text labels", "cat-names", rows, protocols=("grpc",))
    yield _Request(
        "regression",
        "cat-regressor",
        {"inputs": [tensor("x", "FP32", [2, 4], IRIS)]},
    )
    for name in ("sk-classifier", "xgb-classes", "lgb-regressor", "cat-classes"):
        yield _Request("INT64", name, {"inputs": [tensor("x", "INT64", [2, 4], [5, 3, 1, 0, 6, 3, 5, 2])]})
        yield _Request(
            "content type np of the request",
            name,
            {"parameters": {"content_type": "np"}, "inputs": [tensor("x", "FP64", [2, 4], IRIS)]},
        )
        yield _Request(
            "content type np of the input", name, {"inputs": [tensor("x", "FP64", [2, 4], IRIS, content_type="np")]}
        )
    for name in ("sk-classifier", "sk-metadata", "xgb-classes", "xgb-binary"):
        yield _Request(
            "probabilities",
            name,
            {"inputs": [tensor("x", "FP32", [2, 4], IRIS)], "outputs": [{"name": "predict_proba"}]},
        )
        yield _Request(
            "two outputs",
            name,
            {
                "inputs": [tensor("x", "FP32", [2, 4], IRIS)],
                "outputs": [{"name": "predict"}, {"name": "predict_proba"}],
            },
        )
    yield _Request(
        "nested data",
        "sk-classifier",
        {"inputs": [tensor("x", "FP32", [2, 4], [IRIS[:4], IRIS[4:]])]},
        protocols=("rest",),
    )
    columns = [tensor(f"Column_{i}", "FP64", [2], IRIS[i::4]) for i in range(4)]
    for name in ("lgb-regressor", "cat-classes"):
        yield _Request("content type pd", name, {"parameters": {"content_type": "pd"}, "inputs": columns})


def _estimators() -> Iterator[_Request]:
    yield _Request("three features", "sk-regressor", {"inputs": [tensor("x", "FP64", [1, 3], [5, 3, 1])]})
    yield _Request("two targets", "sk-two-outputs", {"inputs": [tensor("x", "FP64", [2, 2], [5, 3, 4, 2])]})
    yield _Request(
        "transform by name",
        "sk-scaler",
        {"inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])], "outputs": [{"name": "transform"}]},
    )
    yield _Request(
        "unknown output",
        "sk-classifier",
        {"inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])], "outputs": [{"name": "margin"}]},
    )
    yield _Request(
        "probabilities of a regressor",
        "sk-regressor",
        {"inputs": [tensor("x", "FP64", [1, 3], [5, 3, 1])], "outputs": [{"name": "predict_proba"}]},
    )
    yield _Request(
        "unknown output of XGBoost",
        "xgb-binary",
        {"inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])], "outputs": [{"name": "margin"}]},
    )
    yield _Request(
        "probabilities of a regressor of XGBoost",
        "xgb-regressor",
        {"inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])], "outputs": [{"name": "predict_proba"}]},
    )


def _strings() -> Iterator[_Request]:
    yield _Request(
        "text", "sk-words", {"inputs": [tensor("x", "BYTES", [2, 1], ["red", "green"])]}, protocols=("rest",)
    )
    yield _Request(
        "text",
        "sk-words",
        {"inputs": [tensor("x", "BYTES", [2, 1], ["red", "green"])]},
        protocols=("grpc",),
    )
    yield _Request(
        "text as np",
        "sk-words",
        {"inputs": [tensor("x", "BYTES", [2, 1], ["red", "green"], content_type="np")]},
        protocols=("rest",),
    )
    frame = [
        tensor("size", "FP64", [2, 1], [1, 3]),
        tensor("colour", "BYTES", [2, 1], ["red", "blue"], content_type="str"),
    ]
    yield _Request("columns", "sk-frame", {"inputs": frame})
    yield _Request("columns, pd", "sk-frame", {"parameters": {"content_type": "pd"}, "inputs": frame})
    yield _Request("columns, probabilities", "sk-frame", {"inputs": frame, "outputs": [{"name": "predict_proba"}]})
    plain = [tensor("size", "FP64", [2], [1, 3]), tensor("colour", "BYTES", [2], ["red", "blue"])]
    yield _Request("columns of one axis", "sk-frame", {"inputs": plain}, protocols=("rest",))


def _mlflow() -> Iterator[_Request]:
    columns = [tensor("a", "FP64", [2, 1], [1.0, 2.0]), tensor("b", "INT64", [2, 1], [3, 4])]
    yield _Request("columns", "mlf-columns", {"inputs": columns})
    yield _Request("columns, pd", "mlf-columns", {"parameters": {"content_type": "pd"}, "inputs": columns})
    yield _Request(
        "columns of one axis",
        "mlf-columns",
        {"inputs": [tensor("a", "FP64", [2], [1, 2]), tensor("b", "INT64", [2], [3, 4])]},
    )
    yield _Request("tensor", "mlf-tensor", {"inputs": [tensor("x", "FP64", [2, 2], [1, 3, 2, 4])]})
    yield _Request(
        "tensor, np",
        "mlf-tensor",
        {"parameters": {"content_type": "np"}, "inputs": [tensor("x", "FP64", [1, 2], [1, 3])]},
    )
    yield _Request("text", "mlf-words", {"inputs": [tensor("colour", "BYTES", [2, 1], ["red", "green"])]})
    yield _Request("missing column", "mlf-columns", {"inputs": columns[:1]})


def _codecs() -> Iterator[_Request]:
    """Content types, of inputs and of requests, by a model that describes the decoded values."""
    numbers, texts = tensor("x", "FP32", [2, 2], [1.0, 2.0, 3.0, 4.0]), ["ab", "c"]
    yield _Request("no content type", "describe", {"inputs": [numbers]})
    yield _Request(
        "FP32 sent as integers",
        "describe",
        {"inputs": [tensor("x", "FP32", [2], [1, 2])]},
        protocols=("rest",),
    )
    for datatype, data in (
        ("BOOL", [True, False]),
        ("UINT8", [1, 255]),
        ("INT16", [-1, 2]),
        ("UINT64", [1, 2**53]),
        ("FP64", [0.1, 1e300]),
    ):
        yield _Request(
            f"np of {datatype}", "describe", {"inputs": [tensor("x", datatype, [2], data, content_type="np")]}
        )
    yield _Request(
        "np of text", "describe", {"inputs": [tensor("x", "BYTES", [2], texts, content_type="np")]}, protocols=("rest",)
    )
    yield _Request("np of the request", "describe", {"parameters": {"content_type": "np"}, "inputs": [numbers]})
    yield _Request("str", "describe", {"inputs": [tensor("x", "BYTES", [2], texts, content_type="str")]})
    yield _Request("str [N, 1]", "describe", {"inputs": [tensor("x", "BYTES", [2, 1], ["ä", ""], content_type="str")]})
    yield _Request(
        "str of the request",
        "describe",
        {"parameters": {"content_type": "str"}, "inputs": [tensor("x", "BYTES", [2], texts)]},
    )
    yield _Request("text without content type", "describe", {"inputs": [tensor("x", "BYTES", [2], texts)]})
    yield _Request("base64", "describe", {"inputs": [tensor("x", "BYTES", [1], ["AP8="], content_type="base64")]})
    yield _Request(
        "datetime",
        "describe",
        {"inputs": [tensor("x", "BYTES", [1], ["2024-02-29T12:30:00"], content_type="datetime")]},
    )
    yield _Request(
        "null in text",
        "describe",
        {"inputs": [tensor("x", "BYTES", [2], ["a", None], content_type="str")]},
        protocols=("rest",),
    )
    frame = [tensor("a", "FP64", [2, 1], [1.0, 2.0]), tensor("t", "BYTES", [2, 1], texts, content_type="str")]
    yield _Request("pd", "describe", {"parameters": {"content_type": "pd"}, "inputs": frame})
    yield _Request(
        "pd with JSON cells",
        "describe",
        {
            "parameters": {"content_type": "pd"},
            "inputs": [tensor("j", "BYTES", [2, 1], ["[1, 2]", '{"a": null}'], content_type="pd_json")],
        },
    )
    yield _Request(
        "pd, null",
        "describe",
        {
            "parameters": {"content_type": "pd"},
            "inputs": [tensor("t", "BYTES", [2, 1], ["a", None], content_type="str")],
        },
        protocols=("rest",),
    )
    yield _Request(
        "a data frame with a matrix",
        "tagged",
        {
            "inputs": [
                tensor("words", "BYTES", [2], texts),
                tensor("x", "FP32", [2, 2], [1, 2, 3, 4], content_type="np"),
            ]
        },
        protocols=("rest",),
    )
    yield _Request(
        "content types of the metadata",
        "tagged",
        {"inputs": [tensor("words", "BYTES", [2], texts), tensor("x", "FP32", [2, 1], [1, 2])]},
    )
    unknown = tensor("x", "FP32", [1], [1], content_type="nope")
    yield _Request("unknown content type", "describe", {"inputs": [unknown]})
    yield _Request("two inputs", "describe", {"inputs": [numbers, tensor("y", "INT32", [1], [7], content_type="np")]})
    yield _Request(
        "requested output as base64",
        "byname",
        {"inputs": [numbers], "outputs": [{"name": "texts", "parameters": {"content_type": "base64"}}]},
    )
    yield _Request(
        "requested output as str",
        "byname",
        {"inputs": [numbers], "outputs": [{"name": "texts", "parameters": {"content_type": "str"}}]},
    )


def _custom() -> Iterator[_Request]:
    numbers = tensor("x", "FP32", [2, 2], [1.0, 2.0, 3.0, 4.0])
    for datatype, data in (
        ("FP32", [0.1, 2.5]),
        ("FP64", [0.1, 1e-300]),
        ("INT8", [-3, 4]),
        ("INT32", [1, 2]),
        ("INT64", [1, 2**40]),
        ("UINT16", [1, 7]),
    ):
        yield _Request(f"double of {datatype}", "double", {"inputs": [tensor("x", datatype, [2], data)]})
    yield _Request("double of [1, 2, 2]", "double", {"inputs": [tensor("x", "FP32", [1, 2, 2], [1, 2, 3, 4])]})
    yield _Request("double of an empty tensor", "double", {"inputs": [tensor("x", "FP32", [0, 2], [])]})
    yield _Request("two inputs", "double", {"inputs": [numbers, tensor("y", "INT64", [1], [3])]})
    yield _Request("numbers as they came", "plain", {"inputs": [numbers]})
    yield _Request("text as it came", "plain", {"inputs": [tensor("t", "BYTES", [2], ["ab", "c"])]})
    yield _Request("booleans as they came", "plain", {"inputs": [tensor("b", "BOOL", [2], [True, False])]})
    yield _Request("decode_args", "upper", {"inputs": [tensor("words", "BYTES", [2], ["a", "b"])]})
    yield _Request(
        "decode_args, optional",
        "upper",
        {"inputs": [tensor("words", "BYTES", [1], ["a"]), tensor("suffix", "BYTES", [1], ["!"])]},
    )
    yield _Request(
        "decode_args, arrays", "norm", {"inputs": [tensor("x", "FP64", [2], [3, 6]), tensor("y", "FP64", [2], [4, 8])]}
    )
    yield _Request("decode_args, missing", "norm", {"inputs": [tensor("x", "FP64", [2], [3, 6])]})
    yield _Request(
        "decode_args, unknown",
        "upper",
        {"inputs": [tensor("words", "BYTES", [1], ["a"]), tensor("z", "BYTES", [1], ["!"])]},
    )
    yield _Request(
        "data frame",
        "frame",
        {
            "inputs": [
                tensor("a", "INT64", [2, 1], [1, 2]),
                tensor("t", "BYTES", [2, 1], ["x", "y"], content_type="str"),
            ]
        },
    )
    yield _Request(
        "data frame with NaN", "frame", {"inputs": [tensor("a", "FP64", [2, 1], [1, None])]}, protocols=("rest",)
    )
    yield _Request("data frame of lists", "frameoflists", {"inputs": [tensor("a", "INT64", [2, 1], [1, 2])]})
    yield _Request("every codec", "kinds", {"inputs": [numbers]}, protocols=("rest",))
    yield _Request(
        "parameters", "request", {"parameters": {"depth": 3, "name": "n", "exact": True}, "inputs": [numbers]}
    )
    yield _Request("no parameters", "request", {"inputs": [numbers]})
    yield _Request("requested output", "request", {"id": "a", "inputs": [numbers], "outputs": [{"name": "output-1"}]})
    yield _Request("header", "request", {"inputs": [numbers]}, headers={"x-parity": "yes"})
    yield _Request("whole request", "whole", {"inputs": [tensor("x", "FP64", [2], [1, 2])]})
    yield _Request("whole request, id", "whole", {"id": "w", "inputs": [tensor("x", "FP64", [2, 2], [1, 2, 3, 4])]})
    yield _Request("parameters of the response", "marked", {"inputs": [numbers]})
    yield _Request("InferenceError", "failing", {"inputs": [tensor("k", "BYTES", [1], ["inference"])]})
    yield _Request("another error", "failing", {"inputs": [tensor("k", "BYTES", [1], ["other"])]})
    text = '{"name": "Ada"}'
    counted = {"inputs": [tensor("q", "BYTES", [len(text)], [text])]}
    yield _Request("shape that counts characters", "jsonhelloworld", counted)
    single = {"inputs": [tensor("q", "BYTES", [1], [text], content_type="str")]}
    yield _Request("one element", "jsonhelloworld", single)
    words = {"inputs": [tensor("t", "BYTES", [1], ["one two three"])]}
    yield _Request("plain call of a streaming model", "stream", words)
    for path in ("infer_stream", "generate_stream"):
        path_of_model = f"/v2/models/stream/{path}"
        yield _Request(path, "", words, path=path_of_model, method="POST", protocols=("rest",))
    yield _Request("generate", path="/v2/models/stream/generate", method="POST", body=words, protocols=("rest",))
    yield _Request(
        "infer of a version",
        path="/v2/models/sk-version/versions/v2/infer",
        method="POST",
        body={"inputs": [tensor("x", "FP32", [2, 4], IRIS)]},
        protocols=("rest",),
    )


def _invalid() -> Iterator[_Request]:
    yield _Request("unknown model", "unknown", {"inputs": [tensor("x", "FP32", [1], [1])]})
    for name in ("sk-classifier", "xgb-classes", "lgb-regressor"):
        yield _Request("three features of four", name, {"inputs": [tensor("x", "FP32", [1, 3], [5, 3, 1])]})
    rest = ("rest",)
    yield _Request("no inputs", "double", {"inputs": []})
    yield _Request(
        "data that do not fit the shape",
        "double",
        {"inputs": [tensor("x", "FP32", [3], [1, 2])]},
        protocols=rest,
    )
    yield _Request("no JSON object", path="/v2/models/double/infer", method="POST", body=None, protocols=rest)
    yield _Request("unknown datatype", "double", {"inputs": [tensor("x", "FP33", [1], [1])]}, protocols=rest)
    yield _Request(
        "no shape",
        "double",
        {"inputs": [{"name": "x", "datatype": "FP32", "data": [1]}]},
        protocols=rest,
    )
    yield _Request("numbers as text", "double", {"inputs": [tensor("x", "FP32", [1], ["a"])]}, protocols=rest)
