"""Content types through a server: typed models, frameworks, and custom content types."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import requests
from pandas.testing import assert_frame_equal

import dragoman
from dragoman import InferenceRequest, InferenceResponse
from dragoman.codecs import CODECS, DatetimeCodec, NumpyCodec, NumpyRequestCodec, PandasCodec, StringCodec


async def post(body: Any, *models: Any, name: str, **settings: Any) -> Any:
    """Return the status and the JSON of the response to one request."""
    async with dragoman.Server(*models, http_port=0, grpc_port=-1, **settings) as server:
        url = f"{server.http_url}/v2/models/{name}/infer"
        response = await asyncio.to_thread(requests.post, url, json=body, timeout=60)
    return response.status_code, response.json()


# --- typed models ----------------------------------------------------------------------------------------


def priced(table: pd.DataFrame, currency: str, day: datetime | None = None, factor: float = 2.0) -> pd.DataFrame:
    assert day is None or day.year == 2022
    return table.assign(price=table["price"] * factor, currency=currency)


async def test_a_data_frame_beside_other_inputs() -> None:
    frame = pd.DataFrame({"price": [1.5, np.nan], "name": ["a", "b"]})
    request = PandasCodec.encode_request(frame)
    request.inputs.append(StringCodec.encode_input("currency", "EUR"))
    request.inputs.append(DatetimeCodec.encode_input("day", datetime(2022, 1, 1)))
    status, response = await post(request.to_dict(), priced, name="priced")
    assert status == 200, response
    back = PandasCodec.decode_response(InferenceResponse.from_dict(response))
    assert_frame_equal(back, frame.assign(price=frame.price * 2, currency="EUR"))
    status, response = await post({"inputs": request.to_dict()["inputs"][:2]}, priced, name="priced")
    assert (status, "required input(s) ['currency']" in response["error"]) == (400, True)
    status, response = await post({"inputs": request.to_dict()["inputs"][2:]}, priced, name="priced")
    assert (status, response["error"]) == (400, "expected inputs for 'table', got none")


def days(x: list[datetime], y: list[str]) -> list[datetime]:
    return [day.replace(year=2000) for day in x if y]


async def test_lists_have_shape_n_or_n_by_1_also_in_metadata() -> None:
    x = DatetimeCodec.encode_input("x", [datetime(2022, 1, 11)])
    y = StringCodec.encode_input("y", ["a", "b"])
    status, response = await post(InferenceRequest(inputs=[x, y]).to_dict(), days, name="days")
    assert status == 200, response
    assert response["outputs"][0]["data"] == ["2000-01-11T00:00:00"]
    async with dragoman.Server(days, http_port=0, grpc_port=-1) as server:
        found = await asyncio.to_thread(requests.get, f"{server.http_url}/v2/models/days", timeout=60)
    assert found.json()["inputs"] == [
        {"name": "x", "datatype": "BYTES", "shape": [-1], "parameters": {"content_type": "datetime"}},
        {"name": "y", "datatype": "BYTES", "shape": [-1]},
    ]
    assert found.json()["outputs"] == [{"name": "output-0", "datatype": "BYTES", "shape": [-1]}]


async def test_a_bad_element_is_a_400() -> None:
    x = {"name": "x", "datatype": "BYTES", "shape": [1], "data": ["soon"]}
    y = {"name": "y", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    status, response = await post({"inputs": [x, y]}, days, name="days")
    assert status == 400
    assert "input 'x': content type 'datetime': expected ISO 8601, got b'soon' at element 0" in response["error"]


# --- frameworks ------------------------------------------------------------------------------------------


def _frame() -> Any:
    rng = np.random.default_rng(0)
    return pd.DataFrame({"a": rng.normal(size=40), "b": rng.normal(size=40)})


def _sklearn(folder: Path, frame: Any, y: Any) -> tuple[Path, Callable[[Any], Any]]:
    import joblib
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression().fit(frame, y)
    joblib.dump(model, folder / "m.joblib")
    return folder / "m.joblib", model.predict


def _xgboost(folder: Path, frame: Any, y: Any) -> tuple[Path, Callable[[Any], Any]]:
    import xgboost

    booster = xgboost.train({"objective": "binary:logistic"}, xgboost.DMatrix(frame, y), 3)
    booster.save_model(folder / "m.ubj")
    return folder / "m.ubj", lambda x: booster.predict(xgboost.DMatrix(x))


def _lightgbm(folder: Path, frame: Any, y: Any) -> tuple[Path, Callable[[Any], Any]]:
    import lightgbm

    booster = lightgbm.train({"verbose": -1, "min_data_in_leaf": 2}, lightgbm.Dataset(frame, y), 3)
    booster.save_model(folder / "m.txt")
    return folder / "m.txt", lambda x: booster.predict(x.to_numpy())


@pytest.mark.parametrize("make", [_sklearn, _xgboost, _lightgbm])
async def test_frameworks_accept_arrays_and_data_frames(make: Any, tmp_path: Path) -> None:
    frame = _frame()
    path, predict = make(tmp_path, frame, (frame.a > 0).astype(int))
    runtime = {"m.joblib": "sklearn", "m.ubj": "xgboost", "m.txt": "lightgbm"}[path.name]
    (tmp_path / "m").mkdir()
    path.rename(tmp_path / "m" / path.name)
    (tmp_path / "m" / "dragoman.toml").write_text(f'[model]\nruntime = "{runtime}"\nuri = "{path.name}"\n')
    shuffled = frame[["b", "a"]].assign(a=frame.a)
    bodies = {
        "np": NumpyRequestCodec.encode_request(frame.to_numpy()).to_dict(),
        "pd": PandasCodec.encode_request(shuffled).to_dict(),
    }
    async with dragoman.Server(tmp_path / "m", http_port=0, grpc_port=-1, allow_pickle=True) as server:

        def infer(body: Any) -> Any:
            return requests.post(f"{server.http_url}/v2/models/m/infer", json=body, timeout=60)

        for body in bodies.values():
            response = await asyncio.to_thread(infer, body)
            assert response.status_code == 200, response.text
            np.testing.assert_allclose(response.json()["outputs"][0]["data"], predict(frame), rtol=1e-6)
        wrong = PandasCodec.encode_request(frame.rename(columns={"b": "c"})).to_dict()
        response = await asyncio.to_thread(infer, wrong)
        assert response.status_code == 400
        expected = "expected the columns 'a', 'b': the table has no 'b'; the model has no 'c'"
        assert response.json()["error"] == expected
        text = PandasCodec.encode_request(frame.assign(b="x")).to_dict()
        response = await asyncio.to_thread(infer, text)
        assert (response.status_code, "input 'b'" in response.json()["error"]) == (400, True)
        response = await asyncio.to_thread(infer, {**bodies["np"], "parameters": {"content_type": "npy"}})
        assert (response.status_code, "unknown content type 'npy'" in response.json()["error"]) == (400, True)


# --- custom content types ---------------------------------------------------------------------------

_PORTABLE = '''
"""A model with a content type of its own: images in the portable graymap format, no pickle anywhere."""

from typing import Annotated, Any

import numpy as np

import dragoman
from dragoman import errors
from dragoman.codecs import CODECS, InputCodec


@CODECS.add
class Graymap(InputCodec):
    content_type = "pgm"

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 2

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> dragoman.Tensor:
        rows, columns = value.shape
        text = f"P2 {columns} {rows} 255 " + " ".join(map(str, value.ravel()))
        return dragoman.Tensor.of([text], parameters={"content_type": "pgm"})

    @classmethod
    def to_value(cls, tensor: dragoman.Tensor, where: str = "tensor") -> Any:
        kind, columns, rows, _, *pixels = tensor.data.flat[0].decode().split()
        if kind != "P2":
            raise errors.InvalidInput(f"{where}: content type 'pgm' expects P2, got {kind!r} at element 0")
        return np.array(pixels, np.uint8).reshape(int(rows), int(columns))


@dragoman.model
def inverted(image: Annotated[np.ndarray, Graymap], other: Any = None) -> Annotated[np.ndarray, Graymap]:
    assert other is None or isinstance(other, np.ndarray)
    return 255 - image
'''


@pytest.fixture
def portable(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "inverted").mkdir()
    (tmp_path / "inverted" / "model.py").write_text(_PORTABLE)
    yield tmp_path
    CODECS.remove("pgm")


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_a_content_type_in_the_folder_of_the_model(portable: Path, placement: str) -> None:
    one: dict[str, Any] = {"name": "image", "datatype": "BYTES", "shape": [1], "data": ["P2 2 1 255 0 250"]}
    other = {**one, "name": "other", "parameters": {"content_type": "pgm"}}
    status, response = await post({"inputs": [one, other]}, portable, name="inverted", placement=placement)
    assert status == 200, response
    assert response["outputs"] == [
        {
            "name": "output-0",
            "datatype": "BYTES",
            "shape": [1],
            "data": ["P2 2 1 255 255 5"],
            "parameters": {"content_type": "pgm"},
        }
    ]
    bad = {**one, "data": ["P5 1 1 255 0"]}
    status, response = await post({"inputs": [bad]}, portable, name="inverted", placement=placement)
    assert (status, response) == (400, {"error": "input 'image': content type 'pgm' expects P2, got 'P5' at element 0"})


_REVERSED = """
from dragoman.codecs.string import StringCodec


class Reversed(StringCodec):
    content_type = "reversed"

    @classmethod
    def to_value(cls, tensor, where="tensor"):
        return [text[::-1] for text in super().to_value(tensor, where)]
"""


def test_a_content_type_from_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dragoman.codecs.codec import CodecRegistry

    (tmp_path / "reversed-1.0.dist-info").mkdir()
    (tmp_path / "reversed-1.0.dist-info" / "METADATA").write_text("Name: reversed\nVersion: 1.0\n")
    (tmp_path / "reversed-1.0.dist-info" / "entry_points.txt").write_text(
        "[dragoman.codecs.input]\nreversed = reversed_codec:Reversed\n"
    )
    (tmp_path / "reversed_codec.py").write_text(_REVERSED)
    monkeypatch.syspath_prepend(str(tmp_path))
    fresh = CodecRegistry()
    codec = fresh.input("reversed")
    assert codec.to_value(codec.to_tensor(["abc"])) == ["cba"]
    again = CodecRegistry()
    assert again.input_for(np.arange(2)) is NumpyCodec
    assert again.custom_input_for_hint(codec.type_hint) is codec
