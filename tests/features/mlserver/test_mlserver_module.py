"""The module `mlserver`: its types, codecs and decorator behave as those of the package."""

import asyncio
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any, List  # noqa: UP035 - models have it in their annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

import dragoman
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman_mlserver.__main__ import main
from dragoman_mlserver.mlserver import (
    MLModel,
    ModelParameters,
    ModelSettings,
    Settings,
    codecs,
    errors,
    grpc,
    logging,
    raw,
    types,
    utils,
)
from dragoman_mlserver.mlserver.codecs import base
from dragoman_mlserver.mlserver.codecs import json as json_codec
from dragoman_mlserver.mlserver.codecs.errors import CodecNotFound, InputsNotFound, OutputNotFound
from dragoman_mlserver.mlserver.codecs.utils import SingleInputRequestCodec
from dragoman_mlserver.model import install

NUMBERS = types.RequestInput(name="a", datatype="INT32", shape=[2], data=[1, 2])
WORDS = types.RequestInput(name="b", datatype="BYTES", shape=[1], data=["x"])


def model(method: Callable[..., Any] | None = None, **settings: Any) -> Any:
    kind = type("Mine", (MLModel,), {"predict": codecs.decode_args(method)} if method is not None else {})
    return kind(ModelSettings(name="m", **settings))


def response(method: Callable[..., Any], *inputs: types.RequestInput) -> str:
    found = asyncio.run(model(method).predict(types.InferenceRequest(inputs=list(inputs))))
    text: str = found.model_dump_json()
    return text


def test_the_module_is_imported_once_under_both_names() -> None:
    install()
    import mlserver  # type: ignore[import-not-found, unused-ignore]
    from mlserver.codecs import lists  # type: ignore[import-not-found, unused-ignore]
    from mlserver.codecs.string import StringRequestCodec  # type: ignore[import-not-found, unused-ignore]
    from mlserver.grpc import converters, dataplane_pb2  # type: ignore[import-not-found, unused-ignore]
    from mlserver.types import dataplane  # type: ignore[import-not-found, unused-ignore]

    assert mlserver.__version__ == "1.7.1"  # the release whose interface it has
    assert mlserver.MLModel is MLModel
    assert StringRequestCodec is codecs.StringRequestCodec
    assert dataplane.RequestInput is types.RequestInput
    assert [each.__name__ for each in (converters, dataplane_pb2, lists)] == [
        "dragoman_mlserver.mlserver.grpc",
        "dragoman_mlserver.mlserver.grpc",
        "dragoman_mlserver.mlserver.codecs.json",
    ]
    with pytest.raises(ImportError):
        import mlserver.rest  # type: ignore[import-not-found, unused-ignore]


# --- types: what real objects print ------------------------------------------------------------------------------


def test_requests_as_json() -> None:
    result = types.InferenceRequest(
        inputs=[{"name": "a", "datatype": "INT32", "shape": [2], "data": [1, 2]}], parameters={"q": 2}
    )
    assert (result.id, result.parameters.q, result.inputs[0].parameters) == (None, 2, None)  # type: ignore[union-attr]
    want = '{"parameters":{"q":2},"inputs":[{"name":"a","shape":[2],"datatype":"INT32","data":[1,2]}]}'
    assert result.model_dump_json() == want
    assert types.InferenceRequest.parse_raw(want) == result
    assert types.InferenceRequest.parse_obj(result.dict()) == result
    assert result.copy(update={"id": "3"}).id == "3"
    with pytest.raises(ValueError, match="field 'inputs' is missing"):
        types.InferenceRequest()


def test_parameters_accept_any_field() -> None:
    result = types.Parameters(content_type="str", foo=1)
    assert (result.foo, result.model_extra, result.headers) == (1, {"foo": 1}, None)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        result.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_elements_become_a_list_when_they_are_read() -> None:
    result = types.RequestInput.from_tensor(
        "x", codecs.NumpyCodec.encode_input("x", np.array([1.0, np.nan])).to_tensor()
    )
    held = result.data.tensor
    assert held is not None
    assert result.to_tensor().data is held.data
    assert (list(result.data), len(result.data), result.data[0]) == ([1.0, None], 2, 1.0)
    result.data.root[0] = 5.0
    assert result.to_tensor().data.ravel()[0] == 5.0


def test_text_elements_have_decode() -> None:
    element = codecs.StringCodec.encode_input("x", ["é"]).data[0]
    assert (element, element.decode("utf-8")) == ("é", "é")


@pytest.mark.parametrize(
    "output",
    [
        types.ResponseOutput(name="o", datatype="INT32", shape=[3], data=[1, 2]),
        types.ResponseOutput(name="o", datatype="INT32", shape=[1], data=["x"]),
        types.ResponseOutput(name="o", datatype="BYTES", shape=[1], data=[1]),
        types.ResponseOutput(name="o", datatype="INT32", shape=[1], data=[1.5]),
        types.ResponseOutput(name="o", datatype="UINT8", shape=[1], data=np.array([300])),
        types.ResponseOutput(name="o", datatype="FP32", shape=[1], data=[1e300]),
        types.ResponseOutput(name="o", datatype="BF16", shape=[1], data=np.array([1e300])),
    ],
)
def test_invalid_outputs_are_errors_of_the_model(output: types.ResponseOutput) -> None:
    with pytest.raises(InvalidOutput, match="'o'"):
        output.to_tensor()


@pytest.mark.parametrize(
    ("datatype", "data", "seen"),
    [
        ("BF16", [1.5, None], [1.5, None]),
        ("FP32", np.array([1, 2]), [1.0, 2.0]),
        ("FP64", ["1.5"], [1.5]),
        ("INT8", [1.0, True], [1, 1]),
        ("BOOL", [0, 1], [False, True]),
    ],
)
def test_valid_outputs_are_converted(datatype: str, data: Any, seen: list[Any]) -> None:
    output = types.ResponseOutput(name="o", datatype=datatype, shape=[len(data)], data=data)
    found = output.to_tensor()
    assert found.datatype.name == datatype
    assert types.ResponseOutput.from_tensor("o", found).data.root == seen


# --- codecs: the literals are what the real ones write -------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "want"),
    [
        (
            codecs.NumpyCodec.encode_output("x", np.array([1, 2])),
            '{"name":"x","shape":[2,1],"datatype":"INT64","parameters":{"content_type":"np"},"data":[1,2]}',
        ),
        (
            codecs.StringCodec.encode_output("x", ["a", "b"], use_bytes=False),
            '{"name":"x","shape":[2,1],"datatype":"BYTES","parameters":{"content_type":"str"},"data":["a","b"]}',
        ),
        (
            codecs.Base64Codec.encode_output("x", [b"a", b"b"]),
            '{"name":"x","shape":[2,1],"datatype":"BYTES","parameters":{"content_type":"base64"},'
            '"data":["YQ==","Yg=="]}',
        ),
        (
            codecs.DatetimeCodec.encode_output("x", ["2020-01-01T00:00:00"]),
            '{"name":"x","shape":[1,1],"datatype":"BYTES","parameters":{"content_type":"datetime"},'
            '"data":["2020-01-01T00:00:00"]}',
        ),
    ],
)
def test_outputs(output: types.ResponseOutput, want: str) -> None:
    assert output.model_dump_json() == want


def test_tables() -> None:
    table = pd.DataFrame({"a": [1, 2], "c": [1.5, None]})
    assert codecs.PandasCodec.encode_response("m", table).json() == (
        '{"model_name":"m","parameters":{"content_type":"pd"},"outputs":[{"name":"a","shape":[2,1],'
        '"datatype":"INT64","data":[1,2]},{"name":"c","shape":[2,1],"datatype":"FP64","data":[1.5,null]}]}'
    )
    request = types.InferenceRequest(**codecs.PandasCodec.encode_request(table).dict())
    pd.testing.assert_frame_equal(codecs.PandasCodec.decode_request(request), table)


def test_precedence_of_codecs() -> None:
    """The request goes before the metadata, the metadata before the default."""
    metadata = [{"name": "b", "datatype": "BYTES", "shape": [-1], "parameters": {"content_type": "str"}}]
    mine = model(inputs=metadata)
    assert mine.decode(WORDS.copy()) == ["x"]
    assert mine.decode(WORDS.copy(), default_codec=codecs.NumpyCodec) == ["x"]
    text = WORDS.copy(update={"parameters": types.Parameters(content_type="np"), "data": types.TensorData(["x"])})
    np.testing.assert_array_equal(mine.decode(text), np.array(["x"]))
    assert list(mine.decode(NUMBERS.copy())) == [1, 2]
    assert mine.decode(NUMBERS.copy(), default_codec=codecs.NumpyCodec).tolist() == [1, 2]


def test_whole_requests() -> None:
    request = types.InferenceRequest(inputs=[NUMBERS.copy()], parameters={"content_type": "np"})
    assert model().decode_request(request).tolist() == [1, 2]
    assert codecs.has_decoded(request)
    plain = types.InferenceRequest(inputs=[NUMBERS.copy()])
    assert model().decode_request(plain) is plain
    assert model(parameters={"content_type": "np"}).decode_request(plain).tolist() == [1, 2]


def test_codecs_by_type_of_result() -> None:
    mine = model(parameters={"version": "3"})
    assert mine.encode_response(["a"]).model_dump_json() == (
        '{"model_name":"m","model_version":"3","parameters":{"content_type":"str"},"outputs":[{"name":"output-1",'
        '"shape":[1,1],"datatype":"BYTES","parameters":{"content_type":"str"},"data":["a"]}]}'
    )
    assert mine.encode(np.array([1.0]), types.RequestOutput(name="z")).shape == [1, 1]
    with pytest.raises(CodecNotFound, match="output field with name 'z'"):
        mine.encode(5, types.RequestOutput(name="z"))
    with pytest.raises(CodecNotFound, match="output response with type <class 'dict'>"):
        mine.encode_response({"a": 1})


def test_custom_codecs() -> None:
    @codecs.register_input_codec
    class Reversed(codecs.InputCodec):
        ContentType = "reversed"

        @classmethod
        def encode_output(cls, name: str, payload: Any, **_: Any) -> types.ResponseOutput:
            return types.ResponseOutput(name=name, datatype="BYTES", shape=[1], data=[payload[::-1]])

        @classmethod
        def decode_input(cls, request_input: types.RequestInput) -> Any:
            return request_input.data[0][::-1]

    @codecs.register_request_codec
    class ReversedRequest(SingleInputRequestCodec):
        InputCodec = Reversed
        ContentType = "reversed"

    value = types.RequestInput(
        name="x", datatype="BYTES", shape=[1], data=["abc"], parameters={"content_type": "reversed"}
    )
    assert model().decode(value) == "cba"
    assert codecs.get_decoded_or_raw(value) == "cba"
    request = types.InferenceRequest(inputs=[value], parameters={"content_type": "reversed"})
    assert model().decode_request(request) == "cba"
    assert ReversedRequest.encode_response("m", "xy").outputs[0].data.root == ["yx"]


def test_codecs_of_one_tensor_convert_requests_and_responses() -> None:
    array = np.array([1.5, 2.5])
    sent = codecs.NumpyRequestCodec.encode_request(array)
    assert (sent.parameters, [each.name for each in sent.inputs]) == (types.Parameters(content_type="np"), ["input-1"])
    assert codecs.NumpyRequestCodec.decode_request(sent).tolist() == [[1.5], [2.5]]
    assert codecs.NumpyRequestCodec.decode(sent) is codecs.get_decoded(sent.inputs[0])
    answer = codecs.NumpyRequestCodec.encode("m", array, "3")
    assert (answer.model_name, answer.model_version, answer.outputs[0].name) == ("m", "3", "output-1")
    value = codecs.NumpyRequestCodec.decode_response(answer)
    assert value.tolist() == [[1.5], [2.5]]
    assert codecs.NumpyRequestCodec.decode_response(answer) is value
    two = types.InferenceResponse(model_name="m", outputs=[*answer.outputs, *answer.outputs])
    with pytest.raises(codecs.CodecError, match="content type 'np': expected one output, got 2"):
        codecs.NumpyRequestCodec.decode_response(two)
    assert not SingleInputRequestCodec.can_encode(array)
    assert [codecs.NumpyRequestCodec.can_encode(each) for each in (array, ["x"])] == [True, False]


def test_old_names_of_methods_of_codecs() -> None:
    output = codecs.StringCodec.encode("x", ["a"])
    assert (type(output), output.name, list(output.data)) == (types.ResponseOutput, "x", ["a"])
    assert codecs.StringCodec.decode(types.RequestInput(**vars(output))) == ["a"]
    assert codecs.StringCodec.decode_output(output) == ["a"]
    answer = codecs.PandasCodec.encode("m", pd.DataFrame({"a": [1]}), "2")
    assert (answer.model_name, answer.model_version) == ("m", "2")
    pd.testing.assert_frame_equal(codecs.PandasCodec.decode_response(answer), pd.DataFrame({"a": [1]}))
    assert codecs.PandasCodec.decode(codecs.PandasCodec.encode_request(pd.DataFrame({"a": [5]})))["a"].tolist() == [5]


@pytest.mark.parametrize("kind", [codecs.InputCodec, codecs.RequestCodec])
def test_a_codec_without_methods_cannot_convert(kind: Any) -> None:
    assert (kind.ContentType, kind.TypeHint, kind.can_encode(1)) == ("", type(None), False)
    names = [name for name in vars(kind) if name.startswith(("encode", "decode"))]
    assert len(names) == 6
    for name in names:
        with pytest.raises(NotImplementedError):
            getattr(kind, name)(*("x", 1) if name.startswith("encode") and "request" not in name else (1,))


def test_codecs_are_found_by_content_type_value_or_annotation() -> None:
    array = np.ones(1)
    for whole, find in ((False, base.find_input_codec), (True, base.find_request_codec)):
        numbers: Any = codecs.NumpyRequestCodec if whole else codecs.NumpyCodec
        text: Any = codecs.StringRequestCodec if whole else codecs.StringCodec
        assert find("np", ["a"], list[str]) is numbers  # the content type goes first
        assert find(None, array, list[str]) is numbers
        assert find(type_hint=List[str]) is text  # noqa: UP006
        assert find(type_hint=npt.NDArray[np.float64]) is numbers
        assert (find("other"), find(payload=object()), find(type_hint=list[float]), find()) == (None,) * 4
    assert base.find_input_codec_by_payload(array) is codecs.NumpyCodec
    assert base.find_request_codec_by_payload(array) is codecs.NumpyRequestCodec
    assert base.find_input_codec_by_type_hint(list[bytes]) is codecs.Base64Codec
    assert base.find_request_codec_by_type_hint(pd.DataFrame) is codecs.PandasCodec
    assert base.find_request_codec_by_type_hint(int) is None


def test_columns_of_a_table_may_have_a_custom_codec() -> None:
    @codecs.register_input_codec
    class Shouted(codecs.InputCodec):
        ContentType = "shouted"

        @classmethod
        def decode_input(cls, request_input: types.RequestInput) -> Any:
            return [f"{each}!" for each in codecs.StringCodec.decode_input(request_input)]

    column = types.RequestInput(
        name="a", datatype="BYTES", shape=[2, 1], data=["x", "y"], parameters={"content_type": "shouted"}
    )
    table = codecs.PandasCodec.decode_request(types.InferenceRequest(inputs=[column]))
    assert table.to_dict("list") == {"a": ["x!", "y!"]}


def test_values_without_a_codec() -> None:
    request = types.InferenceRequest(inputs=[NUMBERS.copy()])
    assert (codecs.has_decoded(request), codecs.get_decoded(request)) == (False, None)
    assert codecs.get_decoded_or_raw(request) is request
    assert codecs.get_decoded_or_raw(request.inputs[0]) is request.inputs[0].data
    assert codecs.decode_request_input(request.inputs[0]) is None
    request.inputs[0].parameters = types.Parameters(content_type="np")
    assert codecs.decode_inference_request(request) is request
    assert codecs.has_decoded(request.inputs[0])
    assert codecs.get_decoded(request.inputs[0]).tolist() == [1, 2]
    assert codecs.decode_request_input(request.inputs[0], {"a": types.MetadataTensor(**OF_TEXT)}).tolist() == [1, 2]
    with pytest.raises(InvalidInput, match="unknown content type 'nope' of a request"):
        model().decode_request(types.InferenceRequest(inputs=[], parameters={"content_type": "nope"}))
    with pytest.raises(InvalidInput, match="input 'a': unknown content type 'nope'"):
        model().decode(NUMBERS.copy(update={"parameters": types.Parameters(content_type="nope")}))
    with pytest.raises(InvalidInput, match="output 'z': unknown content type 'nope'"):
        model().encode([1], types.RequestOutput(name="z", parameters={"content_type": "nope"}))


OF_TEXT: dict[str, Any] = {
    "name": "a", "datatype": "BYTES", "shape": [-1], "parameters": {"content_type": "str"}
}  # fmt: skip


def test_defaults_of_a_model() -> None:
    mine = model(platform="p", versions=["1", "2"], outputs=[{**OF_TEXT, "parameters": {"content_type": "base64"}}])
    assert (mine.name, mine.version, mine.ready, mine.settings.name) == ("m", None, False, "m")
    assert asyncio.run(mine.metadata()) == types.MetadataModelResponse(
        name="m", versions=["1", "2"], platform="p", inputs=[], outputs=mine.outputs
    )
    assert asyncio.run(mine.load()) is asyncio.run(mine.unload()) is True
    with pytest.raises(NotImplementedError, match="predict\\(\\) method not implemented"):
        asyncio.run(MLModel(mine.settings).predict(types.InferenceRequest(inputs=[])))
    with pytest.raises(NotImplementedError, match="predict_stream\\(\\) method not implemented"):
        mine.predict_stream(None)
    mine.inputs, mine.outputs = mine.outputs, []
    assert ([each.name for each in mine.inputs], mine.settings.outputs) == (["a"], [])
    # the metadata choose the codec of an output, the request goes before them
    mine.outputs = mine.inputs
    assert mine.encode([b"x"], types.RequestOutput(name="a")).data.root == [b"eA=="]
    wanted = types.RequestOutput(name="a", parameters={"content_type": "str"})
    assert mine.encode(["x"], wanted).data.root == ["x"]
    assert mine.encode(5, types.RequestOutput(name="y"), codecs.NumpyCodec).shape == [1]
    assert mine.decode(types.RequestInput(name="a", datatype="BYTES", shape=[1], data=["eA=="])) == [b"x"]
    assert mine.decode(NUMBERS.model_copy(update={"name": "b"})) == [1, 2]
    assert mine.decode(WORDS.model_copy(), codecs.StringCodec) == ["x"]
    with pytest.raises(CodecNotFound, match=r"^Codec not found for output field with name 'y'$"):
        mine.encode(5, types.RequestOutput(name="y"))
    with pytest.raises(CodecNotFound, match=r"^Codec not found for output response with type <class 'int'>$"):
        mine.encode_response(5)
    answer = mine.encode_response({"a": 1}, default_codec=_AnyCodec)
    assert (answer.model_name, answer.model_version, answer.id) == ("m", None, "{'a': 1}")
    assert mine.decode_request(types.InferenceRequest(id="7", inputs=[]), default_codec=_AnyCodec) == "7"


class _AnyCodec(codecs.RequestCodec):
    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **_: Any
    ) -> types.InferenceResponse:
        return types.InferenceResponse(model_name=model_name, model_version=model_version, id=str(payload), outputs=[])

    @classmethod
    def decode_request(cls, request: types.InferenceRequest) -> Any:
        return request.id


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (errors.MLServerError("x"), 400, "x"),
        (errors.MLServerError("x", 503), 503, "x"),
        (errors.InvalidModelURI("m"), 400, "Invalid URI specified for model m"),
        (errors.InvalidModelURI("m", "u"), 400, "Invalid URI specified for model m (u)"),
        (errors.ModelNotFound("m"), 404, "Model m not found"),
        (errors.ModelNotFound("m", "2"), 404, "Model m with version 2 not found"),
        (errors.ModelNotReady("m"), 400, "Model m is not ready yet."),
        (errors.ModelNotReady("m", "2"), 400, "Model m with version 2 is not ready yet."),
        (errors.InferenceError("x"), 400, "x"),
        (errors.ModelParametersMissing("m"), 400, "Parameters missing for model m"),
        (codecs.CodecError("x"), 400, "There was an error encoding / decoding the payload: x"),
        (CodecNotFound(is_input=True), 400, "Codec not found for input field"),
        (CodecNotFound("n", "t"), 400, "Codec not found for output field with name 'n' and type t"),
        (CodecNotFound(is_request=True, is_input=True), 400, "Codec not found for input request"),
        (CodecNotFound(None, "t", is_request=True), 400, "Codec not found for output response with type t"),
        (
            OutputNotFound(1, int, ["a", "b"]),
            400,
            "Unexpected output value at position '1' (<class 'int'>). Expected outputs are 'a', 'b' outputs.",
        ),
        (
            InputsNotFound([NUMBERS, WORDS], {"x": int}),
            400,
            "Input 'a', 'b' were not found. Available inputs are 'x'.",
        ),
    ],
)
def test_errors_have_the_texts_and_statuses_of_mlserver(error: Any, status: int, message: str) -> None:
    assert (error.status_code, str(error)) == (status, message)
    assert isinstance(error, errors.MLServerError)


# --- decode_args ----------------------------------------------------------------------------------------------------

NP_OUT = '{"name":"output-0","shape":[2,1],"datatype":"INT32","parameters":{"content_type":"np"},"data":[1,2]}'
STR_OUT = '{"name":"output-1","shape":[1,1],"datatype":"BYTES","parameters":{"content_type":"str"},"data":["x"]}'


def test_results_of_a_tuple() -> None:
    async def both(self: Any, a: np.ndarray) -> tuple[np.ndarray, list[str]]:
        return a, ["x"]

    assert response(both, NUMBERS.copy()) == f'{{"model_name":"m","outputs":[{NP_OUT},{STR_OUT}]}}'


def test_a_table_as_result_keeps_its_columns() -> None:
    async def table(self: Any, a: np.ndarray) -> pd.DataFrame:
        return pd.DataFrame({"q": [1]})

    want = '{"model_name":"m","outputs":[{"name":"q","shape":[1,1],"datatype":"INT64","data":[1]}]}'
    assert response(table, NUMBERS.copy()) == want


def test_optional_inputs() -> None:
    async def maybe(self: Any, a: np.ndarray, b: list[str] | None = None) -> np.ndarray:
        assert b in (None, ["x"])
        return a

    for inputs in ([NUMBERS.copy()], [NUMBERS.copy(), WORDS.copy()]):
        assert response(maybe, *inputs) == f'{{"model_name":"m","outputs":[{NP_OUT}]}}'
    with pytest.raises(InputsNotFound, match=r"Input 'c' was not found\. Available inputs are 'a', 'b'."):
        response(maybe, NUMBERS.copy(), NUMBERS.copy(update={"name": "c"}))
    with pytest.raises(InvalidInput, match=r"^input 'a' is missing: expected inputs 'a', 'b'$"):
        response(maybe, WORDS.copy())


def test_the_metadata_choose_the_codec_of_an_argument() -> None:
    async def shouted(self: Any, b: list[str]) -> list[str]:
        return [each.upper() if isinstance(each, str) else each.decode() for each in b]

    metadata = [{"name": "b", "datatype": "BYTES", "shape": [-1], "parameters": {"content_type": "base64"}}]
    given = types.RequestInput(name="b", datatype="BYTES", shape=[1], data=["eA=="])
    request = types.InferenceRequest(inputs=[given])
    assert '"data":["x"]' in asyncio.run(model(shouted, inputs=metadata).predict(request)).model_dump_json()
    assert '"data":["EA=="]' in response(shouted, given.model_copy())


def test_names_of_datatypes() -> None:
    names = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES".split()  # noqa: SIM905
    assert [str(each) for each in types.Datatype] == names
    assert [each.name for each in types.Datatype] == names


def test_a_table_takes_the_inputs_that_no_other_parameter_names() -> None:
    async def rest(self: Any, table: pd.DataFrame, b: list[str]) -> list[str]:
        return [*table.columns, *b]

    other = types.RequestInput(name="c", datatype="INT32", shape=[2], data=[1, 2])
    assert '"data":["a","c","x"]' in response(rest, NUMBERS.copy(), WORDS.copy(), other)


def test_without_annotations_types_of_values_select_codecs() -> None:
    async def unannotated(self: Any, a, b):  # type: ignore[no-untyped-def]
        return np.array(list(a), dtype=np.int32), list(b)

    assert response(unannotated, NUMBERS.copy(), WORDS.copy()) == f'{{"model_name":"m","outputs":[{NP_OUT},{STR_OUT}]}}'

    async def unknown(self: Any, a, b):  # type: ignore[no-untyped-def]
        return object()

    with pytest.raises(OutputNotFound, match="at position '0'"):
        response(unknown, NUMBERS.copy(), WORDS.copy())


def _words(data: list[Any], shape: list[int]) -> types.RequestInput:
    return types.RequestInput(name="x", datatype="BYTES", shape=shape, data=types.TensorData(data))


def test_arrays_of_text_that_a_fixed_width_cannot_hold() -> None:
    """NumPy drops zero characters at the end, and one long element would make all others as wide."""
    assert codecs.NumpyCodec.decode_input(_words(["a\0", "b"], [2])).tolist() == ["a\0", "b"]
    wide = codecs.NumpyCodec.decode_input(_words(["x" * 100_000, *["y"] * 999], [1000]))
    assert (wide.dtype, wide[0], wide[-1]) == (np.dtype(object), "x" * 100_000, "y")


def test_one_null_is_none() -> None:
    assert codecs.StringCodec.decode_input(types.RequestInput(name="x", datatype="BYTES", shape=[1], data=[None])) == [
        None
    ]


def test_null_stays_none_after_data_was_read() -> None:
    given = _words(["a", None], [2])
    assert given.data.root == ["a", None]
    assert codecs.StringCodec.decode_input(given) == ["a", None]
    output = types.ResponseOutput(name="y", datatype="BYTES", shape=[2], data=types.TensorData(["a", None]))
    with pytest.raises(InvalidOutput, match="expected bytes or text, got NoneType"):
        output.to_tensor()


def test_elements_of_text_are_text_or_bytes() -> None:
    output = types.ResponseOutput(name="y", datatype="BYTES", shape=[1], data=types.TensorData([1]))
    with pytest.raises(InvalidOutput, match="expected bytes or text, got int"):
        output.to_tensor()


def test_a_codec_of_one_tensor_rejects_several() -> None:
    request = types.InferenceRequest(inputs=[_words(["a"], [1]), _words(["b"], [1])])
    with pytest.raises(codecs.CodecError, match="content type 'np': expected one input, got 2"):
        codecs.NumpyRequestCodec.decode_request(request)


def test_errors_of_codecs_name_inputs_and_outputs() -> None:
    wrong = {"name": "w", "datatype": "BYTES", "shape": [1], "data": ["?"], "parameters": {"content_type": "datetime"}}
    request = types.InferenceRequest(inputs=[wrong])
    response = types.InferenceResponse(model_name="m", outputs=[wrong])
    with pytest.raises(InvalidInput, match=r"^input 'w': "):
        codecs.PandasCodec.decode_request(request)
    with pytest.raises(InvalidInput, match=r"^output 'w': "):
        codecs.PandasCodec.decode_response(response)


def test_a_request_of_one_tensor_is_decoded_once() -> None:
    request = types.InferenceRequest(inputs=[NUMBERS.model_copy()])
    found = codecs.NumpyRequestCodec.decode_request(request)
    assert found.tolist() == [1, 2]
    assert codecs.NumpyRequestCodec.decode_request(request) is found
    response = types.InferenceResponse(model_name="m", outputs=[vars(NUMBERS)])
    found = codecs.NumpyRequestCodec.decode_response(response)
    assert codecs.NumpyRequestCodec.decode_response(response) is found
    encoded = codecs.NumpyRequestCodec.encode_request(np.array([1, 2]))
    assert [each.name for each in encoded.inputs] == ["input-1"]


def test_encoded_tensors_have_the_shapes_of_mlserver_and_its_parameters() -> None:
    scalar = codecs.NumpyCodec.encode_output("n", np.array(7))
    assert (scalar.shape, scalar.data.root) == ([1], [7])
    assert codecs.NumpyCodec.encode_output("t", np.array(["a"])).parameters == types.Parameters(content_type="np")
    assert codecs.Base64Codec.encode_output("b", ["x"]).data.root == [b"eA=="]
    import pandas as pd

    frame = pd.DataFrame({"cells": [np.arange(2), {"a": np.float32(0.5)}]})
    (cells,) = codecs.PandasCodec.encode_outputs(frame)
    assert [json.loads(each) for each in cells.data.root] == [[0, 1], {"a": 0.5}]
    assert cells.parameters == types.Parameters(content_type="pd_json", pandas_dtype="object")


def test_fields_are_excluded_as_in_pydantic() -> None:
    given = types.InferenceRequest(
        inputs=[codecs.NumpyCodec.encode_input("x", np.ones((1, 2))), codecs.NumpyCodec.encode_input("y", np.ones(1))]
    )
    assert [set(each) for each in given.model_dump(exclude={"inputs": {"__all__": {"parameters"}}})["inputs"]] == [
        {"name", "shape", "datatype", "data"}
    ] * 2
    assert [each["name"] for each in given.dict(exclude={"inputs": {0}})["inputs"]] == ["y"]
    assert "shape" not in given.inputs[0].dict(exclude={"shape", "name"})
    assert given.dict(exclude={"parameters": {"content_type"}, "inputs": True}) == {}
    assert "parameters" in given.model_dump_json()
    assert "parameters" not in given.model_dump_json(exclude={"inputs": {"__all__": {"parameters"}}})


def test_fields_are_included_as_in_pydantic() -> None:
    tensors = [codecs.StringCodec.encode_input(name, ["a", "b"]) for name in ("x", "y")]
    given = types.InferenceRequest(id="1", inputs=tensors)
    assert given.model_dump(include={"id"}) == {"id": "1"}
    assert given.dict(include={"inputs": {"__all__": {"name"}}}) == {"inputs": [{"name": "x"}, {"name": "y"}]}
    for everything in (True, ...):
        assert given.dict(include={"inputs": {1: everything}}) == {"inputs": [given.inputs[1].dict()]}
    assert given.dict(include={"inputs": {1: {"name", "data"}}}, exclude={"inputs": {1: {"data"}}}) == {
        "inputs": [{"name": "y"}]
    }
    assert given.model_dump_json(include={"id": True}) == '{"id":"1"}'


@pytest.mark.parametrize("content_type", ["np", "str"])
def test_a_decoded_request_has_decoded_inputs(content_type: str) -> None:
    tensor = types.RequestInput(name="x", shape=[2], datatype="BYTES", data=["a", "b"])
    request = types.InferenceRequest(inputs=[tensor], parameters=types.Parameters(content_type=content_type))
    mine = model()
    whole = mine.decode_request(request)
    assert mine.decode(tensor) is whole
    assert list(whole) == ["a", "b"]


CLIENT = """
import sys
import numpy as np
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

request = InferenceRequest(inputs=[NumpyCodec.encode_input("x", np.array([[1, 2]]))])
with open(sys.argv[1], "w") as file:
    file.write(request.json())
fields = InferenceRequest.parse_file(sys.argv[1]).inputs[0].dict()
response = InferenceResponse(**{"model_name": "m", "outputs": [fields]})
print(NumpyCodec.decode_output(response.outputs[0]).tolist(), InferenceRequest.__module__)
"""


def test_a_script_that_imports_mlserver(tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    command = [sys.executable, "-m", "dragoman_mlserver"]
    run = subprocess.run([*command, str(script), str(tmp_path / "r.json")], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("[[1, 2]] dragoman_mlserver.mlserver.types\n", "")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "usage: python -m dragoman_mlserver SCRIPT" in run.stderr
    run = subprocess.run([*command, "missing.py"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "'missing.py' cannot be read: No such file or directory\n")


def test_the_folder_of_an_environment_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sysconfig.get_path", {"purelib": str(tmp_path)}.__getitem__)
    names = ["import_dragoman_mlserver.pth", "import_dragoman_mlserver.py"]

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["dragoman_mlserver", *arguments])
        main()
        return capsys.readouterr().out

    assert run("--install") == f"wrote {names[0]} and {names[1]} in {tmp_path}\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == names
    assert (tmp_path / names[0]).read_text() == "import import_dragoman_mlserver\n"
    before = sys.meta_path[:]
    try:
        exec((tmp_path / names[1]).read_text(), {})
        finder: Any = sys.meta_path[-1]
    finally:
        sys.meta_path[:] = before
    assert finder.find_spec("mlserver.types") is None
    assert finder.find_spec("mlserver") is not None
    assert run("--uninstall") == f"removed {names[0]} and {names[1]} in {tmp_path}\n"
    assert list(tmp_path.iterdir()) == []
    run("--uninstall")
    monkeypatch.setattr("sysconfig.get_path", {"purelib": str(tmp_path / "none")}.__getitem__)
    message = f"'{tmp_path / 'none'}' cannot be changed: No such file or directory; use a virtual environment"
    with pytest.raises(SystemExit, match=f"^{re.escape(message)}$"):
        run("--install")
    for arguments in ([], ["-x"]):
        with pytest.raises(SystemExit, match=r"^usage: python -m dragoman_mlserver SCRIPT [^$]*undo --install$"):
            run(*arguments)


def test_every_script_of_an_environment_may_import_mlserver(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv").rglob("site-packages"))
    libraries = Path(np.__file__).parents[1]
    code = "import mlserver.codecs as c; print(c.__name__, c.StringCodec.encode_input('x', ['a']).shape)"

    def run(*arguments: str, isolated: bool = False) -> subprocess.CompletedProcess[str]:
        path = "" if isolated else f"{Path(dragoman.__file__).parents[1]}{os.pathsep}{libraries}"
        command = [str(tmp_path / "venv" / "bin" / "python"), *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    command = ["-m", "dragoman_mlserver"]
    files = "import_dragoman_mlserver.pth and import_dragoman_mlserver.py"
    assert run(*command, "--install").stdout == f"wrote {files} in {site}\n"
    assert run("-c", code).stdout == "dragoman_mlserver.mlserver.codecs [1, 1]\n"
    # Without Dragoman, and beside the package.
    assert "No module named 'mlserver'" in run("-c", code, isolated=True).stderr
    (site / "mlserver").mkdir()
    (site / "mlserver" / "__init__.py").write_text("")
    assert run("-c", "import mlserver; print(mlserver.__file__)").stdout == f"{site}/mlserver/__init__.py\n"
    assert "No module named 'mlserver.codecs'" in run("-c", code).stderr
    assert run(*command, "--uninstall").returncode == 0
    assert [each.name for each in site.glob("*dragoman*")] == []


# --- modules for clients and codecs --------------------------------------------------------------------------------


@pytest.mark.parametrize("use_raw", [False, True])
def test_requests_as_messages_of_grpc(use_raw: bool) -> None:
    text = types.RequestInput(
        name="t", datatype="BYTES", shape=[2], data=["\u00e9", "b"], parameters={"content_type": "str"}
    )
    request = types.InferenceRequest(
        id="7",
        parameters={"top": 3, "headers": {"x": "1"}},
        inputs=[NUMBERS, text],
        outputs=[types.RequestOutput(name="y", parameters={"content_type": "np"})],
    )
    message = grpc.ModelInferRequestConverter.from_types(request, "m", "2", use_raw=use_raw)
    assert (message.model_name, message.model_version, message.id) == ("m", "2", "7")
    raw = [b"\1\0\0\0\2\0\0\0", b"\2\0\0\0\xc3\xa9\1\0\0\0b"]
    assert list(message.raw_input_contents) == (raw if use_raw else [])
    assert list(message.inputs[0].contents.int_contents) == ([] if use_raw else [1, 2])
    again = grpc.ModelInferRequestConverter.to_types(message)
    assert again.model_dump() == {**request.model_dump(), "parameters": {"top": 3}}
    assert list(again.inputs[1].data) == ["\u00e9".encode(), b"b"]


def test_invalid_messages_name_the_tensor() -> None:
    message = grpc.ModelInferResponse(model_name="m", outputs=[{"name": "y", "datatype": "FP16", "shape": [1]}])
    with pytest.raises(InvalidInput, match="'y': expected typed or raw contents, got none"):
        grpc.ModelInferResponseConverter.to_types(message)
    message.raw_output_contents.append(b"\0\0\0")
    with pytest.raises(InvalidInput, match="'y': shape \\[1\\] of FP16 needs 2 bytes, got 3"):
        grpc.ModelInferResponseConverter.to_types(message)
    half = types.ResponseOutput(name="y", datatype="FP16", shape=[1], data=[0.5])
    response = types.InferenceResponse(model_name="m", outputs=[half])
    assert grpc.ModelInferResponseConverter.from_types(response, use_raw=True).raw_output_contents == [b"\0\x38"]
    with pytest.raises(InvalidInput, match="'y': FP16 has no typed contents; set use_raw=True"):
        grpc.ModelInferResponseConverter.from_types(response)


def test_responses_as_messages_of_grpc() -> None:
    output = types.ResponseOutput(name="y", datatype="FP32", shape=[1], data=[0.5], parameters={"content_type": "np"})
    response = types.InferenceResponse(
        id="7", model_name="m", model_version="2", parameters={"a": 1, "b": [1]}, outputs=[output]
    )
    for use_raw, contents in ((False, []), (True, [b"\0\0\0\x3f"])):
        message = grpc.ModelInferResponseConverter.from_types(response, use_raw=use_raw)
        assert (message.model_name, message.model_version, message.id) == ("m", "2", "7")
        assert list(message.raw_output_contents) == contents
        again = grpc.ModelInferResponseConverter.to_types(message)
        assert again.model_dump() == {**response.model_dump(), "parameters": {"a": 1}}
        assert list(again.outputs[0].data) == [0.5]
    bare = types.InferenceResponse(model_name="m", outputs=[])
    message = grpc.ModelInferResponseConverter.from_types(bare)
    assert message == grpc.ModelInferResponse(model_name="m")
    again = grpc.ModelInferResponseConverter.to_types(message)
    assert (again.model_version, again.parameters, again.outputs) == (None, None, [])
    empty = types.InferenceRequest(inputs=[types.RequestInput(name="x", datatype="FP16", shape=[0, 2], data=[])])
    message = grpc.ModelInferRequestConverter.from_types(empty, "m", use_raw=True)
    del message.raw_input_contents[:]
    assert message.model_version == ""
    found = grpc.ModelInferRequestConverter.to_types(message)
    assert (found.outputs, list(found.inputs[0].data), found.inputs[0].shape) == (None, [], [0, 2])
    message.inputs[0].contents.int_contents.append(1)
    with pytest.raises(InvalidInput, match="'x': "):
        grpc.ModelInferRequestConverter.to_types(message)


def test_parameters_as_messages_of_grpc() -> None:
    parameters = types.Parameters(content_type="np", a=True, b=2, c=0.5, d={"e": 1}, f=[1])
    message = grpc.ParametersConverter.from_types(parameters)
    assert {name: each.WhichOneof("parameter_choice") for name, each in message.items()} == {
        "content_type": "string_param",
        "a": "bool_param",
        "b": "int64_param",
        "c": "double_param",
    }
    found = grpc.ParametersConverter.to_types(message)
    assert found is not None
    assert found.model_dump() == {"content_type": "np", "a": True, "b": 2, "c": 0.5}
    assert grpc.ParametersConverter.to_types({}) is None


def test_metadata_as_messages_of_grpc() -> None:
    server = grpc.ServerMetadataResponse(name="s", version="1", extensions=["a", "b"])
    assert grpc.ServerMetadataResponseConverter.to_types(server).model_dump() == {
        "name": "s",
        "version": "1",
        "extensions": ["a", "b"],
    }
    kind = grpc.ModelMetadataResponse.TensorMetadata
    x, y = kind(name="x", datatype="FP32", shape=[-1, 2]), kind(name="y", datatype="BYTES", shape=[1])
    x.parameters["content_type"].string_param = "np"
    model_ = grpc.ModelMetadataResponse(name="m", versions=["1", "2"], platform="p", inputs=[x], outputs=[y])
    assert grpc.ModelMetadataResponseConverter.to_types(model_).model_dump() == {
        "name": "m",
        "versions": ["1", "2"],
        "platform": "p",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2], "parameters": {"content_type": "np"}}],
        "outputs": [{"name": "y", "datatype": "BYTES", "shape": [1]}],
    }
    bare = grpc.ModelMetadataResponseConverter.to_types(grpc.ModelMetadataResponse(name="m", platform="p"))
    assert (bare.inputs, bare.outputs) == (None, None)


def test_methods_of_the_stub() -> None:
    class Channel:
        def unary_unary(self, path: str, **functions: Any) -> Any:
            return "unary", path, functions

        def stream_stream(self, path: str, **functions: Any) -> Any:
            return "stream", path, functions

    stub = grpc.GRPCInferenceServiceStub(Channel())
    names = "ServerLive ServerReady ModelReady ServerMetadata ModelMetadata ModelInfer RepositoryIndex"
    for name in (*names.split(), "RepositoryModelLoad", "RepositoryModelUnload", "ModelStreamInfer"):
        kind, path, functions = getattr(stub, name)
        assert (kind, path) == ("stream" if "Stream" in name else "unary", f"/inference.GRPCInferenceService/{name}")
        of = name.replace("Stream", "")
        request, response = getattr(grpc, f"{of}Request"), getattr(grpc, f"{of}Response")
        assert functions["request_serializer"](request()) == b""
        assert functions["response_deserializer"](b"") == response()
        assert type(functions["response_deserializer"](b"")) is response
        assert functions["request_serializer"] == request.SerializeToString


def test_raw_contents_of_tensors() -> None:
    tensors = [NUMBERS.model_copy(), WORDS.model_copy()]
    emptied, contents = raw.extract_raw(tensors)
    assert contents == [b"\1\0\0\0\2\0\0\0", b"\1\0\0\0x"]
    assert [list(each.data) for each in emptied] == [[], []]
    assert [list(each.data) for each in raw.inject_raw(emptied, contents)] == [[1, 2], [b"x"]]


def test_json_of_values_with_arrays_and_bytes() -> None:
    assert json_codec.encode_to_json_bytes({"a": b"x", "b": [float("nan")]}) == b'{"a":"x","b":[null]}'
    with pytest.raises(TypeError):
        json_codec.encode_to_json_bytes({"a": {1}})
    assert json_codec.encode_to_json({"a": np.array([1, 2]), "b": np.float32(0.5)}) == b'{"a":[1,2],"b":0.5}'
    assert json_codec.encode_to_json(np.int8(3), use_bytes=False) == "3"
    assert json_codec.decode_from_bytelike_json_to_dict('{"a": 1}') == {"a": 1}
    rows = types.RequestInput(name="r", datatype="BYTES", shape=[2], data=['{"a": 1}', b"[2]"])
    assert json_codec.decode_json_input_or_output(rows) == [{"a": 1}, [2]]
    assert list(json_codec.as_list("ab")) == ["ab"]
    assert [json_codec.is_list_of(each, str) for each in (["a"], ["a", 1], "a")] == [True, False, False]


def test_headers_of_requests_and_responses() -> None:
    request = utils.insert_headers(types.InferenceRequest(inputs=[]), {"x-user": "ada"})
    assert request.parameters.headers == {"x-user": "ada"}  # type: ignore[union-attr]
    response = types.InferenceResponse(model_name="m", outputs=[], parameters={"headers": {"a": "b"}, "k": 1})
    assert utils.extract_headers(response) == {"a": "b"}
    assert response.model_dump() == {"model_name": "m", "parameters": {"k": 1}, "outputs": []}
    assert utils.extract_headers(types.InferenceResponse(model_name="m", outputs=[])) is None


def test_settings_of_a_file_know_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model-settings.json"
    path.write_text('{"name": "m", "parameters": {"uri": "weights.bin"}}')
    (tmp_path / "weights.bin").touch()
    settings = ModelSettings.parse_file(path)
    assert asyncio.run(utils.get_model_uri(settings)) == str(tmp_path / "weights.bin")
    assert (settings.name, settings._source) == ("m", str(path))


def test_the_file_of_a_model(tmp_path: Path) -> None:
    def found(uri: str | None, *names: str, source: Path | None = None) -> str:
        settings = ModelSettings.from_fields(
            {"name": "m", "parameters": None if uri is None else {"uri": uri}}, str(source or tmp_path / "settings")
        )
        return asyncio.run(utils.get_model_uri(settings, names))

    (tmp_path / "a").mkdir()
    assert found("a", "y", "x") == str(tmp_path / "a")
    (tmp_path / "a" / "x").touch()
    assert found("a", "y", "x") == str(tmp_path / "a" / "x")
    (tmp_path / "a" / "y").touch()
    assert found("a", "y", "x") == str(tmp_path / "a" / "y")
    assert found("a/x", "y") == str(tmp_path / "a" / "x")
    for uri, message in ((None, "Invalid URI specified for model m"), ("", "Invalid URI specified for model m")):
        with pytest.raises(errors.InvalidModelURI) as error:
            found(uri)
        assert str(error.value) == message
    with pytest.raises(errors.InvalidModelURI, match=f"for model m \\({tmp_path}/b\\)"):
        found("b")
    assert utils.to_absolute_path(ModelSettings(name="m"), "u") == "u"


def test_small_functions_of_the_module() -> None:
    assert (logging.logger.name, logging.get_logger()) == ("mlserver", logging.logger)
    assert len({utils.generate_uuid() for _ in range(3)}) == 3
    assert len(utils.generate_uuid()) == 36
    wrapped = codecs.decode_args(test_raw_contents_of_tensors)
    assert utils.get_wrapped_method(wrapped) is test_raw_contents_of_tensors
    ended: list[Any] = []

    async def run() -> None:
        async def work() -> int:
            return 5

        task = utils.schedule_with_callback(work(), lambda task: ended.append(task.result()))
        await task
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ended == [5]
    request = utils.insert_headers(types.InferenceRequest(inputs=[], parameters={"k": 1}), {"a": "b"})
    assert request.parameters == types.Parameters(k=1, headers={"a": "b"})
    arrays = types.RequestInput(name="x", datatype="FP32", shape=[1], data=[1])
    assert codecs.adapted.to_dtype(arrays) == np.dtype("float32")
    assert codecs.adapted.to_datatype(bool) == "BOOL"
    assert codecs.adapted.encode_str("é") == b"\xc3\xa9"
    assert [codecs.adapted.decode_str(each) for each in (b"\xc3\xa9", "é")] == ["é", "é"]
    assert codecs.adapted.decode_str(b"\xe9", "latin-1") == "é"


def test_settings_have_the_defaults_of_mlserver() -> None:
    assert Settings(other=1).model_dump() == {
        "debug": False,
        "parallel_workers": 1,
        "host": "127.0.0.1",
        "http_port": 8080,
        "grpc_port": 8081,
        "other": 1,
    }
    assert Settings(cors_settings={}).cors_settings.model_dump() == {  # type: ignore[union-attr]
        "allow_origins": [],
        "allow_credentials": False,
        "allow_methods": ["GET"],
        "allow_headers": [],
        "expose_headers": [],
        "max_age": 600,
    }
    settings = ModelSettings(name="m", implementation=MLModel, parameters={"uri": "u", "own": 1})
    assert settings.implementation_ is settings.implementation is MLModel
    assert settings.model_dump(exclude={"implementation"}) == {
        "name": "m",
        "platform": "",
        "versions": [],
        "inputs": [],
        "outputs": [],
        "warm_workers": False,
        "max_batch_size": 0,
        "max_batch_time": 0.0,
        "parameters": {"uri": "u", "autogenerate_inference_pool_gid": False, "extra": {}, "own": 1},
        "cache_enabled": False,
    }
    settings.versions.append("1")
    assert ModelSettings().versions == []  # each object has lists of its own
    assert (settings.version, ModelSettings().version, ModelSettings().name) == (None, None, "")


def test_parameters_of_a_model_have_the_defaults_of_mlserver() -> None:
    assert ModelParameters().model_dump(exclude_none=False) == {
        "uri": None,
        "version": None,
        "environment_path": None,
        "environment_tarball": None,
        "inference_pool_gid": None,
        "autogenerate_inference_pool_gid": False,
        "format": None,
        "content_type": None,
        "extra": {},
    }
    assert ModelSettings().model_dump(exclude_none=False)["parallel_workers"] is None
    assert Settings().model_dump(exclude_none=False)["metrics_endpoint"] is None


def test_a_codec_derived_from_another_one_may_use_it() -> None:
    class Halved(codecs.NumpyCodec):
        ContentType = "halved"

        @classmethod
        def decode_input(cls, request_input: Any) -> Any:
            return super().decode_input(request_input) / 2

    codecs.register_input_codec(Halved)
    tensor = types.RequestInput(name="x", datatype="FP32", shape=[2], data=[2.0, 4.0])
    assert Halved.decode_input(tensor).tolist() == [1.0, 2.0]
