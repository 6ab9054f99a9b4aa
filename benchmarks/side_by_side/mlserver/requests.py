"""The requests of the comparison."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """An inference request, or without `model` an HTTP request of `method` and `path`.

    `reason`: why the answers are known to differ; "" if they must be identical.
    """

    name: str
    model: str = ""
    body: Mapping[str, Any] | None = None
    reason: str = ""
    path: str = ""
    method: str = "GET"
    protocols: Sequence[str] = ("rest", "grpc")
    headers: Mapping[str, str] = field(default_factory=dict)


def tensor(name: str, datatype: str, shape: Sequence[int], data: Sequence[Any], **parameters: Any) -> dict[str, Any]:
    """Return a tensor in the form of a JSON request."""
    given = {"parameters": parameters} if parameters else {}
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": list(data), **given}


IRIS = [5.1, 3.5, 1.4, 0.2, 6.7, 3.0, 5.2, 2.3]
UNKNOWN_CODEC = "an unknown content type is a 400; MLServer ignores it"
STREAM_HEADERS = "MLServer writes CloudEvents headers into each message of a stream"
TEXT_SHAPE = "the shape of the response is that of its data; MLServer sends the wrong one that the model states"
CLIENT_ERROR = (
    "MLServer answers 500 (INTERNAL or UNKNOWN over gRPC) to an invalid request; Dragoman 400 (INVALID_ARGUMENT)"
)


def cases() -> Iterator[Case]:
    """Yield all cases; those with both protocols are two requests."""
    for group in (_server, _tables, _estimators, _strings, _mlflow, _codecs, _custom, _invalid):
        yield from group()


def _server() -> Iterator[Case]:
    rest = ("rest",)
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/sk-classifier/ready"):
        yield Case(path, path=path, protocols=rest)
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
        yield Case(f"metadata of {name}", path=f"/v2/models/{name}", protocols=rest)
    path = "/v2/models/sk-version/versions/v2"
    yield Case("metadata of a version", path=path, protocols=rest)
    yield Case("readiness of a version", path="/v2/models/sk-version/versions/v2/ready", protocols=rest)
    for path in ("/v2/models/unknown", "/v2/models/unknown/ready", "/v2/models/sk-version/versions/v9"):
        yield Case(path, path=path, protocols=rest)
    for path in ("/v2/docs", "/v2/docs/dataplane.json", "/v2/models/sk-classifier/docs"):
        yield Case(path, path=path, protocols=rest)
    yield Case(
        "/v2/models/unknown/docs",
        path="/v2/models/unknown/docs",
        reason="the page is sent for any name, and reports that the document of the model is a 404",
        protocols=rest,
    )


def _tables() -> Iterator[Case]:
    """Each model of four numbers, with each datatype and form."""
    names = [
        *("sk-classifier", "sk-metadata", "sk-proba", "sk-names", "sk-scaler", "sk-version"),
        *("xgb-classes", "xgb-binary", "xgb-regressor", "xgb-booster"),
        *("lgb-regressor", "lgb-binary", "lgb-classes", "cat-classes", "cat-binary"),
    ]
    for name in names:
        yield Case("FP32", name, {"inputs": [tensor("x", "FP32", [2, 4], IRIS)]})
        yield Case("one row with an id", name, {"id": "r-1", "inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])]})
    rows = {"inputs": [tensor("x", "FP32", [2, 4], IRIS)]}
    yield Case("text labels", "cat-names", rows, protocols=("rest",))
    yield Case(
        "text labels", "cat-names", rows, "MLServer cannot send an array of text objects over gRPC", protocols=("grpc",)
    )
    yield Case(
        "regression",
        "cat-regressor",
        {"inputs": [tensor("x", "FP32", [2, 4], IRIS)]},
        reason="MLServer reads every CatBoost file as a classifier, and answers 500 for a regressor",
    )
    for name in ("sk-classifier", "xgb-classes", "lgb-regressor", "cat-classes"):
        yield Case("INT64", name, {"inputs": [tensor("x", "INT64", [2, 4], [5, 3, 1, 0, 6, 3, 5, 2])]})
        yield Case(
            "content type np of the request",
            name,
            {"parameters": {"content_type": "np"}, "inputs": [tensor("x", "FP64", [2, 4], IRIS)]},
        )
        yield Case(
            "content type np of the input", name, {"inputs": [tensor("x", "FP64", [2, 4], IRIS, content_type="np")]}
        )
    for name in ("sk-classifier", "sk-metadata", "xgb-classes", "xgb-binary"):
        yield Case(
            "probabilities",
            name,
            {"inputs": [tensor("x", "FP32", [2, 4], IRIS)], "outputs": [{"name": "predict_proba"}]},
        )
        yield Case(
            "two outputs",
            name,
            {
                "inputs": [tensor("x", "FP32", [2, 4], IRIS)],
                "outputs": [{"name": "predict"}, {"name": "predict_proba"}],
            },
        )
    yield Case(
        "nested data",
        "sk-classifier",
        {"inputs": [tensor("x", "FP32", [2, 4], [IRIS[:4], IRIS[4:]])]},
        protocols=("rest",),
    )
    columns = [tensor(f"Column_{i}", "FP64", [2], IRIS[i::4]) for i in range(4)]
    for name in ("lgb-regressor", "cat-classes"):
        yield Case("content type pd", name, {"parameters": {"content_type": "pd"}, "inputs": columns})


def _estimators() -> Iterator[Case]:
    yield Case("three features", "sk-regressor", {"inputs": [tensor("x", "FP64", [1, 3], [5, 3, 1])]})
    yield Case("two targets", "sk-two-outputs", {"inputs": [tensor("x", "FP64", [2, 2], [5, 3, 4, 2])]})
    yield Case(
        "transform by name",
        "sk-scaler",
        {"inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])], "outputs": [{"name": "transform"}]},
    )
    yield Case(
        "unknown output",
        "sk-classifier",
        {"inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])], "outputs": [{"name": "margin"}]},
    )
    yield Case(
        "probabilities of a regressor",
        "sk-regressor",
        {"inputs": [tensor("x", "FP64", [1, 3], [5, 3, 1])], "outputs": [{"name": "predict_proba"}]},
    )
    yield Case(
        "unknown output of XGBoost",
        "xgb-binary",
        {"inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])], "outputs": [{"name": "margin"}]},
    )
    yield Case(
        "probabilities of a regressor of XGBoost",
        "xgb-regressor",
        {"inputs": [tensor("x", "FP64", [1, 4], IRIS[:4])], "outputs": [{"name": "predict_proba"}]},
    )


def _strings() -> Iterator[Case]:
    fixed_width = "MLServer decodes BYTES of gRPC as elements of one fixed width, the last axis of the shape, and fails"
    yield Case("text", "sk-words", {"inputs": [tensor("x", "BYTES", [2, 1], ["red", "green"])]}, protocols=("rest",))
    yield Case(
        "text",
        "sk-words",
        {"inputs": [tensor("x", "BYTES", [2, 1], ["red", "green"])]},
        fixed_width,
        protocols=("grpc",),
    )
    yield Case(
        "text as np",
        "sk-words",
        {"inputs": [tensor("x", "BYTES", [2, 1], ["red", "green"], content_type="np")]},
        protocols=("rest",),
    )
    frame = [
        tensor("size", "FP64", [2, 1], [1, 3]),
        tensor("colour", "BYTES", [2, 1], ["red", "blue"], content_type="str"),
    ]
    yield Case("columns", "sk-frame", {"inputs": frame})
    yield Case("columns, pd", "sk-frame", {"parameters": {"content_type": "pd"}, "inputs": frame})
    yield Case("columns, probabilities", "sk-frame", {"inputs": frame, "outputs": [{"name": "predict_proba"}]})
    plain = [tensor("size", "FP64", [2], [1, 3]), tensor("colour", "BYTES", [2], ["red", "blue"])]
    yield Case("columns of one axis", "sk-frame", {"inputs": plain}, protocols=("rest",))


def _mlflow() -> Iterator[Case]:
    columns = [tensor("a", "FP64", [2, 1], [1.0, 2.0]), tensor("b", "INT64", [2, 1], [3, 4])]
    yield Case("columns", "mlf-columns", {"inputs": columns})
    yield Case("columns, pd", "mlf-columns", {"parameters": {"content_type": "pd"}, "inputs": columns})
    yield Case(
        "columns of one axis",
        "mlf-columns",
        {"inputs": [tensor("a", "FP64", [2], [1, 2]), tensor("b", "INT64", [2], [3, 4])]},
    )
    yield Case("tensor", "mlf-tensor", {"inputs": [tensor("x", "FP64", [2, 2], [1, 3, 2, 4])]})
    yield Case(
        "tensor, np",
        "mlf-tensor",
        {"parameters": {"content_type": "np"}, "inputs": [tensor("x", "FP64", [1, 2], [1, 3])]},
    )
    yield Case("text", "mlf-words", {"inputs": [tensor("colour", "BYTES", [2, 1], ["red", "green"])]})
    yield Case("missing column", "mlf-columns", {"inputs": columns[:1]}, CLIENT_ERROR)


def _codecs() -> Iterator[Case]:
    """Content types, of inputs and of requests, by a model that describes the decoded values."""
    numbers, texts = tensor("x", "FP32", [2, 2], [1.0, 2.0, 3.0, 4.0]), ["ab", "c"]
    yield Case("no content type", "describe", {"inputs": [numbers]})
    yield Case(
        "FP32 sent as integers",
        "describe",
        {"inputs": [tensor("x", "FP32", [2], [1, 2])]},
        "elements of FP32 are floats in `.data`; MLServer leaves integers",
        protocols=("rest",),
    )
    for datatype, data in (
        ("BOOL", [True, False]),
        ("UINT8", [1, 255]),
        ("INT16", [-1, 2]),
        ("UINT64", [1, 2**53]),
        ("FP64", [0.1, 1e300]),
    ):
        yield Case(f"np of {datatype}", "describe", {"inputs": [tensor("x", datatype, [2], data, content_type="np")]})
    yield Case(
        "np of text", "describe", {"inputs": [tensor("x", "BYTES", [2], texts, content_type="np")]}, protocols=("rest",)
    )
    yield Case("np of the request", "describe", {"parameters": {"content_type": "np"}, "inputs": [numbers]})
    yield Case("str", "describe", {"inputs": [tensor("x", "BYTES", [2], texts, content_type="str")]})
    yield Case("str [N, 1]", "describe", {"inputs": [tensor("x", "BYTES", [2, 1], ["ä", ""], content_type="str")]})
    yield Case(
        "str of the request",
        "describe",
        {"parameters": {"content_type": "str"}, "inputs": [tensor("x", "BYTES", [2], texts)]},
    )
    yield Case("text without content type", "describe", {"inputs": [tensor("x", "BYTES", [2], texts)]})
    yield Case("base64", "describe", {"inputs": [tensor("x", "BYTES", [1], ["AP8="], content_type="base64")]})
    yield Case(
        "datetime",
        "describe",
        {"inputs": [tensor("x", "BYTES", [1], ["2024-02-29T12:30:00"], content_type="datetime")]},
    )
    yield Case(
        "null in text",
        "describe",
        {"inputs": [tensor("x", "BYTES", [2], ["a", None], content_type="str")]},
        protocols=("rest",),
    )
    frame = [tensor("a", "FP64", [2, 1], [1.0, 2.0]), tensor("t", "BYTES", [2, 1], texts, content_type="str")]
    yield Case("pd", "describe", {"parameters": {"content_type": "pd"}, "inputs": frame})
    yield Case(
        "pd with JSON cells",
        "describe",
        {
            "parameters": {"content_type": "pd"},
            "inputs": [tensor("j", "BYTES", [2, 1], ["[1, 2]", '{"a": null}'], content_type="pd_json")],
        },
    )
    yield Case(
        "pd, null",
        "describe",
        {
            "parameters": {"content_type": "pd"},
            "inputs": [tensor("t", "BYTES", [2, 1], ["a", None], content_type="str")],
        },
        protocols=("rest",),
    )
    yield Case(
        "a data frame with a matrix",
        "tagged",
        {
            "inputs": [
                tensor("words", "BYTES", [2], texts),
                tensor("x", "FP32", [2, 2], [1, 2, 3, 4], content_type="np"),
            ]
        },
        CLIENT_ERROR,
        protocols=("rest",),
    )
    yield Case(
        "content types of the metadata",
        "tagged",
        {"inputs": [tensor("words", "BYTES", [2], texts), tensor("x", "FP32", [2, 1], [1, 2])]},
    )
    unknown = tensor("x", "FP32", [1], [1], content_type="nope")
    yield Case("unknown content type", "describe", {"inputs": [unknown]}, UNKNOWN_CODEC)
    yield Case("two inputs", "describe", {"inputs": [numbers, tensor("y", "INT32", [1], [7], content_type="np")]})
    yield Case(
        "requested output as base64",
        "byname",
        {"inputs": [numbers], "outputs": [{"name": "texts", "parameters": {"content_type": "base64"}}]},
    )
    yield Case(
        "requested output as str",
        "byname",
        {"inputs": [numbers], "outputs": [{"name": "texts", "parameters": {"content_type": "str"}}]},
    )


def _custom() -> Iterator[Case]:
    numbers = tensor("x", "FP32", [2, 2], [1.0, 2.0, 3.0, 4.0])
    for datatype, data in (
        ("FP32", [0.1, 2.5]),
        ("FP64", [0.1, 1e-300]),
        ("INT8", [-3, 4]),
        ("INT32", [1, 2]),
        ("INT64", [1, 2**40]),
        ("UINT16", [1, 7]),
    ):
        yield Case(f"double of {datatype}", "double", {"inputs": [tensor("x", datatype, [2], data)]})
    yield Case("double of [1, 2, 2]", "double", {"inputs": [tensor("x", "FP32", [1, 2, 2], [1, 2, 3, 4])]})
    yield Case("double of an empty tensor", "double", {"inputs": [tensor("x", "FP32", [0, 2], [])]})
    yield Case("two inputs", "double", {"inputs": [numbers, tensor("y", "INT64", [1], [3])]})
    yield Case("numbers as they came", "plain", {"inputs": [numbers]})
    yield Case("text as it came", "plain", {"inputs": [tensor("t", "BYTES", [2], ["ab", "c"])]})
    yield Case("booleans as they came", "plain", {"inputs": [tensor("b", "BOOL", [2], [True, False])]})
    yield Case("decode_args", "upper", {"inputs": [tensor("words", "BYTES", [2], ["a", "b"])]})
    yield Case(
        "decode_args, optional",
        "upper",
        {"inputs": [tensor("words", "BYTES", [1], ["a"]), tensor("suffix", "BYTES", [1], ["!"])]},
    )
    yield Case(
        "decode_args, arrays", "norm", {"inputs": [tensor("x", "FP64", [2], [3, 6]), tensor("y", "FP64", [2], [4, 8])]}
    )
    yield Case("decode_args, missing", "norm", {"inputs": [tensor("x", "FP64", [2], [3, 6])]}, CLIENT_ERROR)
    yield Case(
        "decode_args, unknown",
        "upper",
        {"inputs": [tensor("words", "BYTES", [1], ["a"]), tensor("z", "BYTES", [1], ["!"])]},
    )
    yield Case(
        "data frame",
        "frame",
        {
            "inputs": [
                tensor("a", "INT64", [2, 1], [1, 2]),
                tensor("t", "BYTES", [2, 1], ["x", "y"], content_type="str"),
            ]
        },
    )
    yield Case(
        "data frame with NaN", "frame", {"inputs": [tensor("a", "FP64", [2, 1], [1, None])]}, protocols=("rest",)
    )
    yield Case("data frame of lists", "frameoflists", {"inputs": [tensor("a", "INT64", [2, 1], [1, 2])]})
    yield Case("every codec", "kinds", {"inputs": [numbers]}, protocols=("rest",))
    yield Case("parameters", "request", {"parameters": {"depth": 3, "name": "n", "exact": True}, "inputs": [numbers]})
    yield Case("no parameters", "request", {"inputs": [numbers]})
    yield Case("requested output", "request", {"id": "a", "inputs": [numbers], "outputs": [{"name": "output-1"}]})
    yield Case("header", "request", {"inputs": [numbers]}, headers={"x-parity": "yes"})
    yield Case("whole request", "whole", {"inputs": [tensor("x", "FP64", [2], [1, 2])]})
    yield Case("whole request, id", "whole", {"id": "w", "inputs": [tensor("x", "FP64", [2, 2], [1, 2, 3, 4])]})
    yield Case("parameters of the response", "marked", {"inputs": [numbers]})
    yield Case("InferenceError", "failing", {"inputs": [tensor("k", "BYTES", [1], ["inference"])]})
    yield Case("another error", "failing", {"inputs": [tensor("k", "BYTES", [1], ["other"])]})
    text = '{"name": "Ada"}'
    counted = {"inputs": [tensor("q", "BYTES", [len(text)], [text])]}
    yield Case("shape that counts characters", "jsonhelloworld", counted, TEXT_SHAPE)
    single = {"inputs": [tensor("q", "BYTES", [1], [text], content_type="str")]}
    yield Case("one element", "jsonhelloworld", single, TEXT_SHAPE)
    words = {"inputs": [tensor("t", "BYTES", [1], ["one two three"])]}
    yield Case("plain call of a streaming model", "stream", words)
    for path in ("infer_stream", "generate_stream"):
        path_of_model = f"/v2/models/stream/{path}"
        yield Case(path, "", words, STREAM_HEADERS, path_of_model, method="POST", protocols=("rest",))
    yield Case("generate", path="/v2/models/stream/generate", method="POST", body=words, protocols=("rest",))
    yield Case(
        "infer of a version",
        path="/v2/models/sk-version/versions/v2/infer",
        method="POST",
        body={"inputs": [tensor("x", "FP32", [2, 4], IRIS)]},
        protocols=("rest",),
    )


def _invalid() -> Iterator[Case]:
    yield Case("unknown model", "unknown", {"inputs": [tensor("x", "FP32", [1], [1])]})
    for name in ("sk-classifier", "xgb-classes", "lgb-regressor"):
        yield Case("three features of four", name, {"inputs": [tensor("x", "FP32", [1, 3], [5, 3, 1])]}, CLIENT_ERROR)
    rest = ("rest",)
    yield Case("no inputs", "double", {"inputs": []})
    yield Case(
        "data that do not fit the shape",
        "double",
        {"inputs": [tensor("x", "FP32", [3], [1, 2])]},
        CLIENT_ERROR,
        protocols=rest,
    )
    unprocessable = "MLServer answers 422 in the form of FastAPI; the specification has 400"
    yield Case(
        "no JSON object", path="/v2/models/double/infer", method="POST", body=None, reason=unprocessable, protocols=rest
    )
    yield Case("unknown datatype", "double", {"inputs": [tensor("x", "FP33", [1], [1])]}, unprocessable, protocols=rest)
    yield Case(
        "no shape",
        "double",
        {"inputs": [{"name": "x", "datatype": "FP32", "data": [1]}]},
        unprocessable,
        protocols=rest,
    )
    yield Case("numbers as text", "double", {"inputs": [tensor("x", "FP32", [1], ["a"])]}, CLIENT_ERROR, protocols=rest)
