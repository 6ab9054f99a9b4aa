"""Data frames, and values of codecs."""

from datetime import datetime
from typing import Any

import numpy as np
import pytest

from dragoman import errors
from dragoman.codecs.codec import CODECS

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
    pd.testing.assert_frame_equal(result.to_frame(), frame())
    pd.testing.assert_frame_equal(result.value, frame())
    assert result["score"].shape == (2, 1)


def test_columns_of_a_frame_by_name(client: Any) -> None:
    table = frame()
    result = client.infer("Echo", {"age": table["Age"], "kind": table["kind"], "x": np.ones(2)})
    assert result["age"].shape == (2,)
    assert result["age"].dtype == np.int32
    assert result["x"].tolist() == [1, 1]


def test_outputs_as_a_frame(client: Any) -> None:
    table = client.infer("Echo", {"n": np.arange(2), "t": ["a", "b"]}).to_frame()
    pd.testing.assert_frame_equal(table, pd.DataFrame({"n": [0, 1], "t": ["a", "b"]}))
    with pytest.raises(errors.InvalidInput):
        client.infer("Echo", {"n": np.arange(2), "m": np.arange(3)}).to_frame()


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
