"""MLflow's scoring protocol: the answers of `/invocations` are those of MLflow's own scoring server."""

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import dragoman

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
pyfunc: Any = None
models: Any = None
types: Any = None

JSON = "application/json"


def _save(folder: Path, name: str, function: Any, signature: Any = None) -> None:
    with warnings.catch_warnings(record=True):  # about type hints and examples
        warnings.simplefilter("ignore", UserWarning)

        class Wrapped(pyfunc.PythonModel):  # type: ignore[misc]
            def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
                return function(model_input, params or {})

        path = folder / name
        pyfunc.save_model(str(path), python_model=Wrapped(), signature=signature, pip_requirements=[])


def _table(data: Any, params: dict[str, Any]) -> Any:
    data["sum"] = data["a"] * params["factor"] + data["b"]
    return data


def _sums(data: Any, _: dict[str, Any]) -> Any:
    return data.sum(axis=-1)


def _quotient(data: Any, _: dict[str, Any]) -> Any:
    return (data["a"] / data["b"]).to_numpy()


def _differences(data: Any, _: dict[str, Any]) -> Any:
    return {"d": data["u"] - data["v"], "first": data["u"][:1]}


# MLServer's class, by the name of the model: which of the saved ones it serves.
OF_MLSERVER = {"of_mlserver": "table", "of_arrays": "tensor", "of_columns": "columns", "of_tensors": "tensors"}
# Datatype and content type of each type of column.
COLUMNS = {
    "boolean": ("BOOL", "np"),
    "integer": ("INT32", "np"),
    "long": ("INT64", "np"),
    "float": ("FP32", "np"),
    "double": ("FP64", "np"),
    "string": ("BYTES", "str"),
    "binary": ("BYTES", "base64"),
    "datetime": ("BYTES", "datetime"),
    "object": ("BYTES", "pd_json"),
}


@pytest.fixture(scope="module", autouse=True)
def _import_mlflow() -> None:
    """Import it when a test runs: collection in another process of pytest-xdist does not need it."""
    global pyfunc, models, types
    pyfunc, models, types = (pytest.importorskip(f"mlflow.{name}") for name in ("pyfunc", "models", "types"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlflow")
    columns = types.Schema([types.ColSpec(kind, name) for kind, name in (("long", "a"), ("double", "b"))])
    text = types.ColSpec("string", "c", required=False)
    params = types.ParamSchema([types.ParamSpec("factor", "long", 2)])
    table = models.ModelSignature(inputs=types.Schema([*columns.inputs, text]), params=params)
    _save(folder, "table", _table, table)
    import numpy as np

    tensor = types.Schema([types.TensorSpec(np.dtype("float32"), (-1, 3))])
    _save(folder, "tensor", _sums, models.ModelSignature(inputs=tensor))
    _save(folder, "quotient", _quotient)
    every = [types.ColSpec(kind, kind) for kind in COLUMNS if kind != "object"]
    every.append(types.ColSpec(types.schema.Array("long"), "object"))
    unnamed = types.Schema([types.ColSpec("long")])
    _save(folder, "columns", _table, models.ModelSignature(inputs=types.Schema(every), outputs=unnamed))
    tensors = types.Schema([types.TensorSpec(np.dtype("float32"), (-1, 3), name) for name in ("u", "v")])
    _save(folder, "tensors", _differences, models.ModelSignature(inputs=tensors, outputs=tensor))
    for name, saved in OF_MLSERVER.items():
        (folder / name).mkdir()
        parameters = {"uri": str(folder / saved), "version": "2"}
        settings = {"name": name, "implementation": "mlserver_mlflow.MLflowRuntime", "parameters": parameters}
        (folder / name / "model-settings.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[TestClient]:
    with TestClient(dragoman.asgi(str(folder), allow_pickle=True, placement="thread")) as client:
        yield client


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, TestClient]:
    """Clients of MLflow's server, which serves one model."""
    from mlflow.pyfunc import scoring_server

    names = ("table", "tensor", "quotient")
    clients = {name: TestClient(scoring_server.init(pyfunc.load_model(str(folder / name)))) for name in names}
    return {**clients, "of_mlserver": clients["table"]}


TABLE = {"columns": ["a", "b", "c"], "data": [[1, 0.5, "x"], [2, 1.5, None]]}
RECORDS = [{"a": 1, "b": 0.5, "c": "x"}, {"a": 2, "b": 1.5}]
SPLIT = {"columns": ["a", "b"], "data": [[1, 2], [0, 0]]}


@pytest.mark.parametrize("model", ["table", "of_mlserver"])
@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (JSON, {"dataframe_split": TABLE}, [2.5, 5.5]),
        (JSON, {"dataframe_split": TABLE, "params": {"factor": 10}}, [10.5, 21.5]),
        ("application/json; charset=utf-8", {"dataframe_records": RECORDS}, [2.5, 5.5]),
        (JSON, {"instances": RECORDS[:1]}, [2.5]),
        (JSON, {"inputs": {"a": [1, 2], "b": [0.5, 1.5]}}, [2.5, 5.5]),
        ("text/csv", "a,b,c\n1,0.5,x\n2,1.5,\n", [2.5, 5.5]),
        ("text/csv;charset=utf-8", "b,a\n0.5,1\n", [2.5]),
    ],
)
def test_tables(
    ours: TestClient, theirs: dict[str, TestClient], model: str, kind: str, body: Any, expected: list[float]
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = ours.post(f"/models/{model}/invocations", content=content, headers={"content-type": kind})
    wanted = theirs[model].post("/invocations", content=content, headers={"content-type": kind})
    values = json.loads(wanted.text, parse_constant=lambda _: None)  # MLflow sends NaN, which is not JSON
    assert (answer.status_code, answer.json()) == (wanted.status_code, values)
    assert [row["sum"] for row in answer.json()["predictions"]] == expected


@pytest.mark.parametrize("body", [{"instances": [[1, 2, 3]]}, {"inputs": [[1, 2, 3], [0.5, 0, 0]]}])
def test_arrays(ours: TestClient, theirs: dict[str, TestClient], body: Any) -> None:
    answer = ours.post("/invocations", json=body, headers={"model_name": "tensor"})
    wanted = theirs["tensor"].post("/invocations", json=body)
    assert (answer.status_code, answer.json()) == (200, wanted.json())


@pytest.mark.parametrize(
    ("kind", "content", "status"),
    [
        (JSON, '{"dataframe_split": {"columns": ["a"], "data": [[1]]}}', 400),
        (JSON, '{"dataframe_split": 1}', 400),
        (JSON, '{"rows": [[1]]}', 400),
        (JSON, '{"instances": [], "inputs": []}', 400),
        (JSON, "[1]", 400),
        (JSON, '{"inputs"', 400),
        (JSON, b"\xff", 400),
        (JSON, '{"inputs": {"a": ["x"], "b": [1]}}', 400),
        (JSON, '{"inputs": {"a": [1], "b": [1]}, "params": {"factor": "x"}}', 400),
        ("application/json; charset=latin-1", "{}", 415),
        ("application/json; format=pandas-split", "{}", 415),
        ("text/csv", "", 400),
    ],
)
def test_errors(ours: TestClient, theirs: dict[str, TestClient], kind: str, content: str | bytes, status: int) -> None:
    answer = ours.post("/models/table/invocations", content=content, headers={"content-type": kind})
    wanted = theirs["table"].post("/invocations", content=content, headers={"content-type": kind})
    assert answer.status_code == wanted.status_code == status
    if status == 415:
        assert answer.text == wanted.text
        return
    assert answer.json()["error_code"] == wanted.json()["error_code"]
    assert answer.json()["message"]
    assert "Traceback" not in answer.text


def test_without_the_text_apis(folder: Path) -> None:
    """The paths are those of the models, not of another protocol."""
    with TestClient(
        dragoman.asgi(str(folder), allow_pickle=True, placement="thread", protocols="oip_rest,kserve_v1")
    ) as client:
        body = {"inputs": [[1, 2, 3]]}
        answer = client.post("/models/tensor/invocations", json=body)
        assert (answer.status_code, answer.json()) == (200, {"predictions": [6.0]})
        unnamed = client.post("/invocations", json=body)
        assert unnamed.status_code == 400
        assert unnamed.json()["error"] == (
            "several models answer /invocations: columns, of_arrays, of_columns, of_mlserver, of_tensors; "
            "name one, as in /models/columns/invocations"
        )
        assert client.post("/models/none/invocations", json=body).status_code == 404
        assert client.get("/models/tensor/invocations").status_code == 404
        root = client.get("/")
        assert (root.status_code, root.json()) == (200, {"status": "alive"})


def test_errors_of_a_model_have_no_traceback(ours: TestClient, theirs: dict[str, TestClient]) -> None:
    answer = ours.post("/models/quotient/invocations", json={"dataframe_records": [{"a": 1}]})
    wanted = theirs["quotient"].post("/invocations", json={"dataframe_records": [{"a": 1}]})
    assert "stack_trace" in wanted.json()
    assert answer.status_code == wanted.status_code == 400
    assert answer.json() == {name: wanted.json()[name] for name in ("error_code", "message")}


def test_metadata_of_models_of_mlserver(ours: TestClient) -> None:
    found = ours.get("/v2/models/of_columns").json()
    assert {each["name"]: (each["datatype"], each["parameters"]["content_type"]) for each in found["inputs"]} == COLUMNS
    assert {tuple(each["shape"]) for each in found["inputs"]} == {(-1, 1)}
    assert [each["name"] for each in found["outputs"]] == ["output-0"]
    assert found["parameters"] == {"content_type": "pd"}
    found = ours.get("/v2/models/of_tensors").json()
    parameters = {"content_type": "np"}
    assert found["inputs"] == [
        {"name": name, "datatype": "FP32", "shape": [-1, 3], "parameters": parameters} for name in ("u", "v")
    ]
    assert found["parameters"] == {"content_type": "dict"}
    found = ours.get("/v2/models/of_arrays").json()
    assert ([each["name"] for each in found["inputs"]], found["outputs"]) == (["input-0"], [])
    assert found["parameters"] == {"content_type": "np"}


def _tensor(name: str, datatype: str, data: list[Any], *shape: int, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "data": data, "shape": shape or [len(data)], "parameters": parameters}


def test_inference_of_models_of_mlserver(ours: TestClient) -> None:
    inputs = [_tensor("a", "INT64", [1, 2]), _tensor("b", "FP64", [0.5, 1.5]), _tensor("c", "BYTES", ["x", "y"])]
    for factor, expected in ((2, [2.5, 5.5]), (10, [10.5, 21.5])):
        body = {"inputs": inputs, "parameters": {"factor": factor} if factor != 2 else {}}
        found = ours.post("/v2/models/of_mlserver/infer", json=body).json()
        assert (found["model_version"], found["parameters"]) == ("2", {"content_type": "pd"})
        assert {each["name"]: each["data"] for each in found["outputs"]}["sum"] == expected
    u, v = _tensor("u", "FP32", [1, 2, 3, 4, 5, 6], 2, 3), _tensor("v", "FP32", [1] * 6, 2, 3)
    found = ours.post("/v2/models/of_tensors/infer", json={"inputs": [u, v]}).json()
    assert found["parameters"] == {"content_type": "dict"}
    assert {each["name"]: (each["shape"], each["data"]) for each in found["outputs"]} == {
        "d": ([2, 3], [0, 1, 2, 3, 4, 5]),
        "first": ([1, 3], [1, 2, 3]),
    }
    (sums,) = ours.post("/v2/models/of_arrays/infer", json={"inputs": [{**u, "name": "any"}]}).json()["outputs"]
    assert (sums["name"], sums["data"]) == ("output-1", [6, 15])
    wrong = ours.post("/v2/models/of_arrays/infer", json={"inputs": [_tensor("any", "FP32", [1, 2], 1, 2)]})
    assert wrong.status_code == 400
    assert wrong.json()["error"].startswith("MLflow rejects the inputs: Shape of input (1, 2) does not match")


def test_limits(ours: TestClient) -> None:
    number = "9" * 5000
    lists, objects = "[" * 5000 + "]" * 5000, f"[{'{},' * (1 << 19)}1]"
    rows = f"[{'[1],' * (1 << 19)}[1]]"
    rows_message = "too many rows: expected at most 524288, got 524290"
    messages = {
        lists: "nests too deep",
        f"[{number}]": "cannot be parsed",
        objects: "too many values in JSON",
        rows: rows_message,
    }
    for value, message in messages.items():
        content = f'{{"inputs": {value}}}'
        answer = ours.post("/models/table/invocations", content=content, headers={"content-type": JSON})
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["message"]
    for line_end in ("\n", "\r"):
        csv = f"a,b,c{line_end}" + f"1{line_end}" * (1 << 19)
        answer = ours.post("/models/table/invocations", content=csv, headers={"content-type": "text/csv"})
        assert (answer.status_code, answer.json()["message"]) == (400, rows_message.replace("524290", "524289"))
    csv = "a" + ",b" * (1 << 18)
    answer = ours.post("/models/table/invocations", content=csv, headers={"content-type": "text/csv"})
    message = "too many columns: expected at most 262144, got 262145"
    assert (answer.status_code, answer.json()["message"]) == (400, message)
    parquet = {"content-type": "application/vnd.apache.parquet"}
    assert ours.post("/models/table/invocations", content=b"PAR1", headers=parquet).status_code == 415


def _sparse_tables() -> Iterator[tuple[str, str]]:
    """Yield bodies of a few kB for tables of 1100 rows and 1100 columns."""
    names = [f"c{n}" for n in range(1100)]
    one_each = [{name: 1} for name in names]
    yield "text/csv", ",".join(names) + "\n1" * 1100
    yield JSON, json.dumps({"dataframe_records": one_each})
    yield JSON, json.dumps({"dataframe_records": one_each, "params": {"factor": float("nan")}})
    for split in (
        {"columns": names, "index": names, "data": []},
        {"data": [names, *([] for _ in names)]},
        {"data": one_each},
        {"data": {name: {name: 1} for name in names}},
    ):
        yield JSON, json.dumps({"dataframe_split": split})
    yield JSON, json.dumps({"inputs": {"a": names, **dict.fromkeys(names, 1)}})


@pytest.mark.parametrize(("kind", "content"), list(_sparse_tables()))
def test_tables_of_missing_cells(ours: TestClient, kind: str, content: str) -> None:
    answer = ours.post("/models/table/invocations", content=content, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "BAD_REQUEST")
    assert "most of them empty" in answer.json()["message"]


def test_commas_and_lines_in_quotes_are_one_cell(ours: TestClient) -> None:
    content = 'a,b,c\n1,0.5,"' + "," * 2000 + "\n" * 2000 + '"\n'
    answer = ours.post("/models/table/invocations", content=content, headers={"content-type": "text/csv"})
    assert [row["sum"] for row in answer.json()["predictions"]] == [2.5]


def test_predictions_that_json_does_not_have(ours: TestClient) -> None:
    answer = ours.post("/models/quotient/invocations", json={"dataframe_split": {**SPLIT, "data": [[1, 2], [0, 0]]}})
    assert (answer.status_code, answer.json()) == (200, {"predictions": [0.5, None]})
    answer = ours.post("/models/quotient/invocations", json={"dataframe_split": {**SPLIT, "data": [[1, 0]]}})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "BAD_REQUEST")
    assert "infinite" in answer.json()["message"]


def test_accept_does_not_change_the_format(ours: TestClient) -> None:
    body = {"inputs": [[1, 2, 3]]}
    answer = ours.post("/models/tensor/invocations", json=body, headers={"accept": "text/csv"})
    assert (answer.status_code, answer.json()) == (200, {"predictions": [6.0]})


def test_the_client_of_mlflow(ours: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas
    from mlflow.pyfunc.scoring_server import client as mlflow_client

    class Requests:  # over our application instead of a socket
        @staticmethod
        def get(url: str) -> Any:
            return ours.get(url)

        @staticmethod
        def post(url: str, data: str, headers: Any) -> Any:
            return ours.post(url, content=data, headers={**headers, "model_name": "table"})

    monkeypatch.setattr(mlflow_client, "requests", Requests)
    client = mlflow_client.ScoringServerClient("testserver", 80)
    client.ping()
    assert client.get_version()
    frame = pandas.DataFrame(RECORDS)[["a", "b"]]
    assert client.invoke(frame, params={"factor": 1}).get_predictions()["sum"].tolist() == [1.5, 3.5]
