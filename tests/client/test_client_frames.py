"""Data frames, and values of codecs."""

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from client.client_servers import Named, url_of
from dragoman import errors
from dragoman.client import tensors
from dragoman.codecs.codec import CODECS
from dragoman.core.datatypes import DATATYPES
from dragoman.core.signature import Signature, TensorSpec

pd = pytest.importorskip("pandas")


def frame() -> Any:
    return pd.DataFrame(
        {
            "Age": np.array([34, 22], np.int32),
            "First Name": ["Joanne", None],
            "when": pd.to_datetime(["2022-01-11T11:00:00", "2022-01-12T00:00:00"]),
            "kind": pd.Categorical(["a", "b"]),
            "maybe": pd.array([1, None], dtype="Int64"),
            "score": [0.5, np.nan],
        }
    )


def test_a_data_frame_roundtrip(client: Any) -> None:
    result = client.infer("Echo", frame())
    pd.testing.assert_frame_equal(result.to_dataframe(), frame())
    pd.testing.assert_frame_equal(result.value, frame())
    assert result["score"].shape == (2, 1)


def test_columns_of_a_frame_by_name(client: Any) -> None:
    table = frame()
    result = client.infer("Echo", {"age": table["Age"], "kind": table["kind"], "x": np.ones(2)})
    assert result["age"].shape == (2,)
    assert result["age"].dtype == np.int32
    assert result["x"].tolist() == [1, 1]


def test_outputs_as_a_frame(client: Any) -> None:
    table = client.infer("Echo", {"n": np.arange(2), "t": ["a", "b"]}).to_dataframe()
    pd.testing.assert_frame_equal(table, pd.DataFrame({"n": [0, 1], "t": ["a", "b"]}))
    with pytest.raises(errors.InvalidInput):
        client.infer("Echo", {"n": np.arange(2), "m": np.arange(3)}).to_dataframe()


def test_datetimes_and_json(client: Any) -> None:
    noon = datetime(2022, 1, 11, 12)
    result = client.infer("Echo", {"one": noon, "many": [noon, noon], "j": [{"a": [1, None]}]})
    assert dict(result) == {"one": [noon], "many": [noon, noon], "j": [{"a": [1, None]}]}


@pytest.mark.parametrize("content_type", ["np", "str", "base64", "datetime"])
def test_codecs_by_name(client: Any, content_type: str) -> None:
    value: Any = {
        "np": np.array([[1.5], [2.5]]),
        "str": ["a", "ü"],
        "base64": [b"\xff", b""],
        "datetime": [datetime(2022, 1, 11)],
    }[content_type]
    result = client.infer("Echo", [CODECS.input(content_type).encode_input("x", value)])
    assert np.array_equal(result["x"], value) if content_type == "np" else result["x"] == value


def test_a_whole_request_by_a_codec(client: Any) -> None:
    codec = CODECS.request("str")
    assert codec is not None
    assert client.infer("Echo", codec.encode_request(["a", "b"])).value == ["a", "b"]


# --- a frame for a model of one matrix -------------------------------------------------------------------------


def test_a_frame_is_a_matrix_in_the_order_of_the_model(client: Any) -> None:
    table = pd.DataFrame({"width": [1, 2], "height": [0.5, np.nan]}, index=["first", "second"])
    for value in (table, {"table": table}):
        np.testing.assert_array_equal(client.infer("Named", value)["scores"], [[0.5, 1], [np.nan, 2]])
    np.testing.assert_array_equal(client.infer("Named", table.iloc[0])["scores"], [[0.5, 1]])


class InProcess(Named):
    placement = "process"  # type: ignore[assignment]


def test_the_order_of_the_model_is_known_from_its_process() -> None:
    with (
        dragoman.Server(InProcess, http_port=0, grpc_port=0) as server,
        dragoman.Client(server.http_url) as rest,
        dragoman.Client(url_of(server, "grpc")) as rpc,
    ):
        for client in (rest, rpc):
            scores = client.infer("InProcess", pd.DataFrame({"width": [1.0], "height": [0.5]}))["scores"]
            np.testing.assert_array_equal(scores, [[0.5, 1]])


def test_columns_without_names_keep_their_order(client: Any) -> None:
    table = pd.DataFrame({"b": np.array([1, 2], np.float32), "a": np.array([3, 4], np.uint8), "c": [True, False]})
    assert client.infer("Rows", table)["sum"].tolist() == [5, 6]
    assert client.infer("Rows", table.astype(np.float32).iloc[0])["sum"].tolist() == [5]


def test_a_column_may_have_the_name_of_the_input(client: Any) -> None:
    table = pd.DataFrame({"x": np.ones(1, np.float32), "y": np.ones(1, np.float32), "z": np.ones(1, np.float32)})
    assert client.infer("Rows", table)["sum"].tolist() == [3]


def test_nullable_columns_have_nan_for_missing_values(client: Any) -> None:
    table = pd.DataFrame({"height": pd.array([1, None], "Int64"), "width": pd.array([True, False], "boolean")})
    np.testing.assert_array_equal(client.infer("Named", table)["scores"], [[1, 1], [np.nan, 0]])
    table["width"] = pd.array([True, None], "boolean")
    with pytest.raises(errors.InvalidInput, match="column 'width': expected booleans, got missing values"):
        client.infer("Named", table)


@pytest.mark.parametrize(
    ("model", "columns", "message"),
    [
        ("Named", {"height": [1], "depth": [2]}, "the data frame has no 'width'; the model has no 'depth'"),
        ("Named", {"height": [1], "width": ["x"]}, "expected columns of numbers, got others in 'width'"),
        ("Named", {"height": [1.5], "width": [2**53 + 1]}, "column 'width': expected integers that FP64 holds exactly"),
        ("Rows", {"a": [1], "b": [2]}, "expected 3 columns, got 2: 'a', 'b'"),
        (
            "Rows",
            {"a": [1.5], "b": [1], "c": [2]},
            r"got FP64; convert the array with \.astype\(np\.float32\), or pass cast",
        ),
    ],
)
def test_columns_that_do_not_fit_are_named(client: Any, model: str, columns: Any, message: str) -> None:
    with pytest.raises(errors.InvalidInput, match=message):
        client.infer(model, pd.DataFrame(columns))


def test_a_frame_is_cast_on_request(client: Any) -> None:
    table = pd.DataFrame({"a": [0.1], "b": [1], "c": [2]})
    assert client.infer("Rows", table, cast=True)["sum"].tolist() == pytest.approx([3.1])
    with pytest.raises(errors.InvalidInput, match=r"column 'a': 1e\+300 at \[0\] does not fit into FP32"):
        client.infer("Rows", pd.DataFrame({"a": [1e300], "b": [1], "c": [2]}), cast=True)


def test_columns_become_the_inputs_of_a_model_by_name(client: Any) -> None:
    table = pd.DataFrame({"by": [3], "x": np.array([2], np.float32)})
    assert client.infer("power", table)["output-0"].tolist() == [[8]]


def test_equal_column_names_are_rejected(client: Any) -> None:
    with pytest.raises(errors.InvalidInput, match="expected unique column names, got 'a' twice"):
        client.infer("Rows", pd.DataFrame([[1, 2, 3]], columns=["a", "a", "b"]))


class Column:
    """A column as polars has it."""

    def __init__(self, values: Any) -> None:
        self.dtype = "Float64"
        self.values = np.array(values)

    def to_numpy(self) -> Any:
        return self.values

    def __len__(self) -> int:
        return len(self.values)


class Interchanged:
    """A frame of pyarrow, known by the DataFrame interchange protocol."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns
        self.columns = list(columns)

    def __dataframe__(self, **_: Any) -> Any:
        raise NotImplementedError

    def __getitem__(self, name: str) -> Column:
        return Column(self._columns[name])


class Polars(Interchanged):
    """A frame of polars, which is also an array: of its columns in their order."""

    __dataframe__: Any = property(doc="not supported")

    def to_numpy(self) -> Any:
        return np.stack([np.array(column) for column in self._columns.values()], axis=1)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.to_numpy()


def test_frames_of_other_libraries(client: Any) -> None:
    frame_of_polars = Polars({"width": [1.0], "height": [2]})
    assert not hasattr(frame_of_polars, "__dataframe__")
    assert client.infer("Named", frame_of_polars)["scores"].tolist() == [[2, 1]]
    assert client.infer("Named", Interchanged({"width": [1.0], "height": [2]}))["scores"].tolist() == [[2, 1]]
    result = client.infer("Echo", Interchanged({"n": [1, 2], "t": np.array(["a", "b"], object)}))
    assert result["n"].tolist() == [1, 2]
    assert result["t"] == ["a", "b"]


def test_a_column_for_an_input_of_one_column(client: Any) -> None:
    assert client.infer("Mixed", {"small": pd.Series([1, 2], dtype="uint8")})["small"].tolist() == [1, 2]
    assert client.infer("Mixed", {"flag": pd.Series([True])})["flag"].tolist() == [[True]]
    assert client.infer("Echo", {"x": pd.Series(["a"], index=["k"])})["x"] == ["a"]


def test_a_matrix_becomes_columns_of_a_frame(client: Any) -> None:
    table = client.infer("Named", pd.DataFrame({"height": [1.0], "width": [2.0]})).to_dataframe()
    pd.testing.assert_frame_equal(table, pd.DataFrame({"scores_a <b>": [1.0], "scores_c": [2.0]}))
    plain = client.infer("Echo", {"m": np.arange(4).reshape(2, 2)}).to_dataframe()
    pd.testing.assert_frame_equal(plain, pd.DataFrame({"m_0": [0, 2], "m_1": [1, 3]}))


def test_rows_of_a_pipeline_with_text_columns(tmp_path: Path) -> None:
    """A frame, a row of it and records are columns by name; labels that are text come back as text."""
    joblib = pytest.importorskip("joblib")
    ensemble, pipeline = pytest.importorskip("sklearn.tree"), pytest.importorskip("sklearn.pipeline")
    compose, preprocessing = pytest.importorskip("sklearn.compose"), pytest.importorskip("sklearn.preprocessing")
    table = pd.DataFrame({"town": ["Bath", "Hull", "Bath", "Hull"], "area": [30, 40, 80, 90]})
    columns = compose.make_column_transformer((preprocessing.OneHotEncoder(), ["town"]), remainder="passthrough")
    estimator = pipeline.make_pipeline(columns, ensemble.DecisionTreeClassifier(random_state=0))
    joblib.dump(estimator.fit(table, ["flat", "flat", "house", "house"]), tmp_path / "homes.joblib")
    with (
        dragoman.Server(tmp_path / "homes.joblib", http_port=0, grpc_port=-1, allow_pickle=True) as server,
        dragoman.Client(server.http_url) as homes,
    ):
        assert homes.infer("homes", table)["predict"] == ["flat", "flat", "house", "house"]
        assert homes.infer("homes", table.iloc[2])["predict"] == ["house"]
        assert homes.infer("homes", table.to_dict("records")[1:3])["predict"] == ["flat", "house"]
        with pytest.raises(errors.InvalidInput, match="number 1 without 'area' and with 'size'"):
            homes.infer("homes", [{"town": "Bath", "area": 1}, {"town": "Bath", "size": 1}])
        with pytest.raises(errors.InvalidInput) as caught:
            homes.infer("homes", table.rename(columns={"area": "size"}))
    expected = "expected the columns 'town', 'area': the table has no 'area'; the model has no 'size'"
    assert str(caught.value) == expected


def _model(datatype: str | None, shape: tuple[int, ...] = (-1, -1)) -> Signature:
    return Signature((TensorSpec("x", DATATYPES.get(datatype or ""), shape),), ())


_BIG = 2**53 + 1


def _big_columns() -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow")
    return {
        "object and floats": pd.DataFrame({"a": pd.Series([_BIG, 0.5], dtype=object)}),
        "object beyond 64 bits": pd.DataFrame({"a": pd.Series([2**63 + 1, -1], dtype=object)}),
        "nullable": pd.DataFrame({"a": pd.array([_BIG, None], dtype="Int64")}),
        "categorical": pd.DataFrame({"a": pd.Categorical([_BIG, None])}),
        "pyarrow table": pa.table({"a": [_BIG, None]}),
        "pyarrow batch": pa.record_batch({"a": [_BIG, None]}),
        "pyarrow array": pa.array([_BIG, None]),
        "pyarrow dictionary": pa.table({"a": pa.array([_BIG, None]).dictionary_encode()}),
    }


@pytest.mark.parametrize("datatype", ["FP64", "INT64", None])
@pytest.mark.parametrize("name", _big_columns())
def test_integers_beside_missing_values_are_never_rounded(name: str, datatype: str | None) -> None:
    with pytest.raises(errors.InvalidInput, match=r"2\*\*53"):
        tensors.request(_big_columns()[name], _model(datatype), "m")


def test_small_integers_beside_missing_values_are_floats() -> None:
    pa = pytest.importorskip("pyarrow")
    batch, encoded = pa.record_batch({"a": [7, None]}), pa.table({"a": pa.array([7, None]).dictionary_encode()})
    for value in (pa.table({"a": [7, None]}), batch, encoded, pd.DataFrame({"a": pd.Categorical([7, None])})):
        (given,) = tensors.request(value, _model("FP64"), "m").inputs
        np.testing.assert_array_equal(given.tensor.data, [[7.0], [np.nan]])


@pytest.mark.parametrize("cast", [False, True])
def test_a_list_of_integers_and_floats_keeps_large_integers(cast: bool) -> None:
    (given,) = tensors.request([[_BIG, 1.0]], _model("INT64"), "m", cast).inputs
    assert given.tensor.data.tolist() == [[_BIG, 1]]
    with pytest.raises(errors.InvalidInput, match="does not fit"):
        tensors.request([[_BIG, 0.5]], _model("INT64"), "m", cast)


def test_an_index_and_an_extension_array_are_columns() -> None:
    for value in (pd.Index([1, 2]), pd.array([1, 2], dtype="Int64")):
        (given,) = tensors.request(value, _model("INT64", (-1, 1)), "m").inputs
        assert given.tensor.data.tolist() == [[1], [2]]
    with pytest.raises(errors.InvalidInput):
        tensors.request(pd.Index([1.0]), Signature((TensorSpec("a"), TensorSpec("b")), ()), "m")


def test_columns_of_equal_names_are_refused_in_any_library() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(errors.InvalidInput, match="unique column names, got 'a' twice"):
        tensors.request(table, _model("INT64"), "m")
