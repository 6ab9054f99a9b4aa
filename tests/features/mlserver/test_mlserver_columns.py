"""Columns of data frames and `null` in the codecs of the module `mlserver`: types do not depend on the data."""

from collections.abc import AsyncIterator
from typing import Any

import pandas as pd
import pytest
import pytest_asyncio

import dragoman
from dragoman_mlserver.mlserver import codecs, errors, types
from dragoman_mlserver.mlserver.huggingface import HuggingfaceListJSONCodec, HuggingfaceSingleJSONCodec
from features.triton.repository import write
from rest.rest_server import RestServer

TEXT: Any = pd.Series(["text"]).dtype
DAY, HOUR = pd.Timestamp("2022-07-11"), pd.Timedelta(hours=1)
FOLD = [pd.Timestamp(each).tz_convert("Europe/Berlin") for each in ("2022-10-30T00:30Z", "2022-10-30T01:30Z")]
WORDS = pd.CategoricalDtype(["low", "high", "a"], ordered=True)
# By the dtype of a column: a value, and another one.
COLUMNS: list[tuple[Any, Any, Any]] = [
    ("int8", 1, 2),
    ("uint64", 1, (1 << 64) - 1),
    ("float32", 1.5, float("nan")),
    ("bool", True, False),
    (TEXT, "x", "é"),
    (object, "x", "é"),
    ("string[python]", "x", "é"),
    ("Int64", 1, 2),
    ("UInt8", 1, 2),
    ("Float32", 1.5, 2.5),
    ("boolean", True, False),
    ("datetime64[ns]", DAY, DAY + HOUR),
    ("datetime64[us]", DAY, DAY + HOUR),
    ("datetime64[s]", DAY, DAY + HOUR),
    ("datetime64[ns, UTC]", DAY.tz_localize("UTC"), FOLD[0].tz_convert("UTC")),
    ("datetime64[us, Europe/Berlin]", *FOLD),
    ("timedelta64[ns]", HOUR, 3 * HOUR),
    ("timedelta64[s]", HOUR, 3 * HOUR),
    (WORDS, "low", "a"),
    (pd.CategoricalDtype([3, 1, 2]), 3, 2),
    (pd.CategoricalDtype([0.5, 1.5]), 1.5, 0.5),
]
HAVE_NO_MISSING = ("int8", "uint64", "float32", "bool")


def sent(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table after it was sent as JSON."""
    text = codecs.PandasCodec.encode_request(table).model_dump_json()
    found: pd.DataFrame = codecs.PandasCodec.decode_request(types.InferenceRequest.model_validate_json(text))
    return found


@pytest.mark.parametrize(("dtype", "value", "other"), COLUMNS, ids=[str(each[0]) for each in COLUMNS])
def test_the_dtype_of_a_column_does_not_depend_on_its_data(dtype: Any, value: Any, other: Any) -> None:
    variants = [[value], [value, other], [other, value], []]
    if dtype not in HAVE_NO_MISSING:
        variants += [[value, None], [None, other, None], [None]]
    for cells in variants:
        table = pd.DataFrame({"a": pd.Series(cells, dtype=dtype)})
        assert table["a"].dtype == dtype
        pd.testing.assert_frame_equal(sent(table), table)


@pytest.mark.parametrize("content_type", [None, "str", "np"])
@pytest.mark.parametrize("cells", [["x", "y"], ["x", None], [None, None], []])
def test_text_of_other_clients_is_a_column_of_text(content_type: str | None, cells: list[str | None]) -> None:
    """They send no dtype, and null for a missing text."""
    parameters = {"content_type": content_type} if content_type else None
    column = {"name": "a", "datatype": "BYTES", "shape": [len(cells)], "data": cells, "parameters": parameters}
    found = codecs.PandasCodec.decode_request(types.InferenceRequest(inputs=[column]))
    pd.testing.assert_frame_equal(found, pd.DataFrame({"a": pd.Series(cells, dtype=TEXT)}))


MODEL = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse


class Decoding(MLModel):
    async def predict(self, payload):
        found = self.decode_request(payload)
        if found is payload:
            found = self.decode(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("y", [repr(found)])])
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RestServer]:
    folder = tmp_path_factory.mktemp("models")
    write(folder / "decoding/model-settings.json", '{"name": "decoding", "implementation": "model.Decoding"}')
    write(folder / "decoding/model.py", MODEL)
    async with dragoman.Server(str(folder), http_port=0, grpc_port=-1, placement="inline") as server:
        yield RestServer(server.http_ports[0], server)


async def decoded(server: RestServer, content_type: str, data: list[Any], **request: Any) -> Any:
    parameters = {"content_type": content_type} if content_type else {}
    tensor = {"name": "x", "datatype": "BYTES", "shape": [len(data)], "data": data, "parameters": parameters}
    return await server.infer("decoding", {"inputs": [tensor], **request})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("content_type", ["", "str", "np", "base64", "datetime", "json", "pd_json", "pillow_image"])
@pytest.mark.parametrize("is_column", [False, True])
async def test_null_among_elements(server: RestServer, content_type: str, is_column: bool) -> None:
    """It is a missing text. Any other content type has none; that of a column is none of a single input."""
    request = {"parameters": {"content_type": "pd"}} if is_column else {}
    tensor = {"name": "x", "datatype": "BYTES", "shape": [2], "data": [None, "null"]}
    body = {"inputs": [{**tensor, "parameters": {"content_type": content_type} if content_type else {}}], **request}
    response = await server.infer("decoding", body)
    if content_type in ("", "str", "np") or (content_type == "pd_json" and not is_column):
        assert response.status == 200, response.error
        (text,) = response.json["outputs"][0]["data"]
        assert ("NaN" if is_column else "None") in text
    else:
        assert response.status == 400
        assert "input 'x': " in response.error


@pytest.mark.parametrize("codec", [HuggingfaceListJSONCodec, HuggingfaceSingleJSONCodec])
@pytest.mark.parametrize("data", [[None], ["{"]])
def test_invalid_json_of_hugging_face(codec: Any, data: list[Any]) -> None:
    with pytest.raises(errors.InferenceError, match="input 'x': expected JSON in each element"):
        codec.decode_input(types.RequestInput(name="x", datatype="BYTES", shape=[1], data=data))
