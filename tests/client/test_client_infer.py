"""Inputs and outputs, over REST and gRPC, with both clients."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dragoman
from dragoman import BF16, BYTES, Tensor, errors
from dragoman.client.results import Result
from dragoman.core.tensor import object_array
from dragoman.formats.message import InferenceRequest, InferenceResponse, RequestInput, RequestOutput

ARRAYS = {
    "bool": np.array([[True, False]]),
    **{f"u{n}": np.array([0, 2 ** (8 * n) - 1], f"u{n}") for n in (1, 2, 4, 8)},
    **{f"i{n}": np.array([-(2 ** (8 * n - 1)), 2 ** (8 * n - 1) - 1], f"i{n}") for n in (1, 2, 4, 8)},
    **{f"f{n}": np.array([[1.5, np.nan], [np.inf, -0.0]], f"f{n}") for n in (2, 4, 8)},
    "bytes": object_array([b"\xff\x00", b"", b"abc"], (3, 1)),
    "empty": np.empty((0, 3), np.float32),
    "empty bytes": np.empty((2, 0), object),
    "scalar": np.array(7, np.int16),
    "large": np.arange(300_000, dtype=np.float64).reshape(3, -1),
    "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_roundtrip(client: Any, name: str) -> None:
    array = ARRAYS[name]
    back = client.infer("Echo", {"x": array})["x"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)


def test_big_endian_arrays_are_converted(client: Any) -> None:
    np.testing.assert_array_equal(client.infer("Echo", {"x": np.array([1, 2], ">i4")})["x"], [1, 2])


def test_bfloat16(client: Any) -> None:
    numbers = np.array([1.0, -2.5, np.inf], ml_dtypes.bfloat16)
    result = client.infer("Echo", {"x": numbers, "y": Tensor.of([0.5], BF16)})
    assert result.response.tensors["x"].datatype is BF16
    assert result["x"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result["x"], numbers)
    assert result["y"].tolist() == [0.5]


def test_text_roundtrip(client: Any) -> None:
    result = client.infer("Echo", {"words": ["süß", "x\0"], "word": "one"})
    assert dict(result) == {"words": ["süß", "x\0"], "word": ["one"]}
    plain = client.infer("Echo", {"words": ["süß"]}, decode=False)
    assert plain["words"].tolist() == ["süß".encode()]


def test_arrays_of_text_and_lists_of_bytes_are_bytes(client: Any) -> None:
    result = client.infer("Echo", {"a": np.array(["x", "yz"]), "b": [b"\xff", b"z"]})
    assert result["a"].tolist() == [b"x", b"yz"]
    assert result["b"].tolist() == [b"\xff", b"z"]


def test_lists_and_numbers_without_metadata_have_numpy_dtypes(client: Any) -> None:
    result = client.infer("Echo", {"x": [[1, 2], [3, 4]], "y": 2.5, "z": True, "w": []})
    assert (result["x"].dtype, result["x"].shape) == (np.int64, (2, 2))
    assert (result["y"].dtype, result["y"].tolist()) == (np.float64, [2.5])
    assert result["z"].tolist() == [True]
    assert result["w"].shape == (0,)


def test_lists_and_numbers_have_the_datatypes_of_the_metadata(client: Any) -> None:
    result = client.infer("Mixed", {"small": [1, 255], "half": [1.5], "flag": True, "word": "w"})
    assert {n: str(t.datatype) for n, t in result.response.tensors.items()} == {
        "small": "UINT8",
        "half": "BF16",
        "flag": "BOOL",
        "word": "BYTES",
    }
    assert result["flag"].shape == (1, 1)
    assert client.infer("Mixed", {"small": []})["small"].dtype == np.uint8


def test_invalid_inputs_are_rejected_before_they_are_sent(client: Any) -> None:
    with pytest.raises(errors.InvalidInput, match="input 'small': 256 does not fit into UINT8"):
        client.infer("Mixed", {"small": [256]})
    with pytest.raises(errors.InvalidInput, match="input 'small': expected lists of equal lengths"):
        client.infer("Mixed", {"small": [[1], [2, 3]]})
    with pytest.raises(errors.InvalidInput, match=r"input 'x'.*complex128"):
        client.infer("Echo", {"x": np.array([1j])})


def test_one_value_for_a_model_of_one_input(client: Any) -> None:
    assert client.infer("Rows", np.ones((2, 3), np.float32))["sum"].tolist() == [3, 3]
    assert client.infer("Rows", [[1, 2, 3]]).to_numpy().tolist() == [6]
    with pytest.raises(errors.InvalidInput, match=r"one input.*'Mixed' has 'small', 'half', 'flag', 'word'"):
        client.infer("Mixed", [1])
    with pytest.raises(errors.InvalidInput, match=r"one input.*'Echo' has none"):
        client.infer("Echo", np.ones(3))


def test_single_values_fit_typed_functions(client: Any) -> None:
    assert client.infer("power", {"x": np.array([3.0]), "by": 3}).value.tolist() == [27.0]


def test_encoded_inputs_are_sent_unchanged(client: Any) -> None:
    one = RequestInput("x", Tensor.of(np.arange(3)))
    for value in (one, [one], {"x": one}, {"x": one.tensor}, InferenceRequest(inputs=[one])):
        assert client.infer("Echo", value)["x"].tolist() == [0, 1, 2]


def test_ids_versions_and_parameters(client: Any) -> None:
    result = InferenceRequest(
        inputs=[RequestInput("x", Tensor.of([1]))], outputs=[RequestOutput("x")], parameters={"a": 1}, id="one"
    )
    response = client.infer("Echo", result, parameters={"b": "é"}).response
    assert (response.id, dict(response.parameters)) == ("one", {"a": 1, "b": "é"})
    response = client.infer("Echo", result, id="two", parameters={"a": 2.5, "c": True}).response
    assert (response.id, dict(response.parameters)) == ("two", {"a": 2.5, "c": True})
    assert response.model_name == "Echo"


def test_requested_outputs(client: Any) -> None:
    value = {"x": np.ones(1), "y": np.zeros(1)}
    assert list(client.infer("Echo", value, outputs=["y"])) == ["y"]
    best = client.infer("Echo", value, outputs=[RequestOutput("x", {"classification": 1})])
    assert best["x"].tolist() == [b"1.000000:0"]


def test_the_result(client: Any) -> None:
    result = client.infer("Echo", {"x": np.ones(2), "t": ["a"]})
    assert repr(result) == "<Result of Echo:\n  x: FP64[2] [1., 1.]\n  t: BYTES[1] ['a']>"
    assert result.to_numpy("t").tolist() == [b"a"]
    assert result["t"] is result["t"]
    assert set(result.value) == {"x", "t"}
    assert not result["x"].flags.writeable
    with pytest.raises(errors.InvalidInput, match="one of 'x', 't'"):
        result.to_numpy()
    with pytest.raises(KeyError):
        result["z"]


def test_an_unknown_content_type_fails_only_on_access() -> None:
    tensor = Tensor.of([b"x"], BYTES, {"content_type": "mine"})
    result = Result(InferenceResponse.of({"x": tensor}, model_name="m"))
    assert result.to_numpy("x").tolist() == [b"x"]
    with pytest.raises(errors.InvalidInput, match="output 'x': unknown content type 'mine'"):
        result["x"]


def test_public_names() -> None:
    assert {"Client", "AsyncClient"} <= set(dragoman.__all__)


@pytest.mark.parametrize("number", [3, np.float64(3), np.float32(3), np.int64(3), np.uint8(3)])
def test_numpy_scalars_are_numbers(client: Any, number: Any) -> None:
    assert client.infer("power", {"x": [2.0], "by": number})["output-0"].tolist() == [8.0]
    back = client.infer("Echo", {"n": number})["n"]
    assert back.tolist() == [3]
    if isinstance(number, np.generic):
        assert back.dtype == number.dtype
    assert client.infer("Mixed", {"flag": np.bool_(True), "small": np.int64(7)})["flag"].tolist() == [[True]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": [1.0], "by": 10**400}, "input 'by': an integer of 1329 bits does not fit into FP64"),
        ({"x": [1.0], "by": [None]}, "input 'by': expected FP64, got NoneType"),
        (
            {"x": [1.0], "by": None},
            "input 'by': expected numbers, text or bytes, or a value with a codec, got NoneType",
        ),
        ({"x": [1.0], "by": np.bool_(True)}, "input 'by': BOOL does not convert to FP64"),
    ],
)
def test_values_that_are_not_numbers_are_rejected(client: Any, inputs: Any, message: str) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        client.infer("power", inputs)
    assert str(caught.value) == message
