"""Arrays of any library, and their conversion to the datatype of the model."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dragoman
from client.client_servers import url_of
from dragoman import BF16, FP16, FP32, FP64, INT8, INT32, INT64, UINT8, UINT64, errors
from dragoman.core.datatypes import DATATYPES
from dragoman.formats.message import InferenceRequest, InferenceResponse, RequestInput

NUMBERS = {name: d for name, d in DATATYPES.items() if name != "BYTES"}


def sent(client: Any, value: Any, datatype: dragoman.Datatype, **options: Any) -> Any:
    """Return the tensor of one value that a model with an input of this datatype receives."""
    return client.infer("Typed", {datatype.name: value}, **options).response.tensors[datatype.name]


# --- conversions without loss --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "datatype"),
    [
        (np.array([[2.5, np.nan]], np.float32), FP64),
        (np.array([1.5, -np.inf], np.float16), FP32),
        (np.array([-(2**31)], np.int32), FP64),
        (np.array([2**53, -(2**53), 2**60, -(2**63)], np.int64), FP64),
        (np.array([2**63], np.uint64), FP64),
        (np.array([255], np.uint8), FP16),
        (np.array([-128], np.int8), BF16),
        (np.array([1.5], ml_dtypes.bfloat16), FP32),
        (np.array([True, False]), FP64),
        (np.array([True]), INT8),
        (np.array([2**32 - 1], np.uint32), INT64),
        (np.array([1, 2], ">i4"), FP64),
        (np.array([1, 2.5], object), FP32),
        (np.array(3, np.int16), FP32),
    ],
)
def test_arrays_are_widened_without_loss(client: Any, array: Any, datatype: dragoman.Datatype) -> None:
    back = sent(client, array, datatype)
    assert back.datatype is datatype
    np.testing.assert_array_equal(back.data.astype(np.float64), array.astype(np.float64))
    assert back.shape == array.shape


@pytest.mark.parametrize(
    ("array", "datatype", "dtype"),
    [
        (np.zeros(2), FP32, "np.float32"),
        (np.array([2**53 + 1], np.int64), FP64, "np.float64"),
        (np.array([1], np.int32), FP32, "np.float32"),
        (np.array([1], np.int64), INT32, "np.int32"),
        (np.array([1], np.float32), BF16, "ml_dtypes.bfloat16"),
        (np.array([1], np.int8), UINT8, "np.uint8"),
    ],
)
def test_other_conversions_need_cast(client: Any, array: Any, datatype: dragoman.Datatype, dtype: str) -> None:
    own = dragoman.Tensor.of(array).datatype
    text = rf"expected datatype {datatype}, got {own}; convert the array with .astype\({dtype}\), or pass cast=True"
    for _ in range(2):  # also with cached metadata
        with pytest.raises(errors.InvalidInput, match=text):
            sent(client, array, datatype)


def test_an_error_about_something_else_has_no_hint(client: Any) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        client.infer("Rows", {"x": np.ones((2, 4), np.float32)})
    assert str(caught.value) == "input 'x': expected shape [-1, 3], got [2, 4]"


EXACT = [
    ([2**24, -(2**24), 2**40, 0], FP32),
    ([16777217.0, 0.1], FP32),
    ([[2**53], [-(2**60)]], FP64),
    ([2**53, 0.5, 1e300], FP64),
    ([2**64], FP64),
    (2**60, FP64),
    ([True, 2**11], FP16),
    ([256, 512], BF16),
    (np.array([2**24, 0.1], object), FP32),
]
INEXACT = [
    ([2**24 + 1, 1], FP32, "16777217 at [0]"),
    ([[1.5], [-(2**24) - 1]], FP32, "-16777217 at [1, 0]"),
    ([2**53 + 1], FP64, "9007199254740993 at [0]"),
    ([0.5, 2**53 + 1], FP64, "9007199254740993 at [1]"),
    ([2**64 + 1, -1], FP64, "18446744073709551617 at [0]"),
    (2**53 + 1, FP64, "9007199254740993 at [0]"),
    ((2049,), FP16, "2049 at [0]"),
    ([257, 259, 1, 261, 263], BF16, "257 at [0], 259 at [1], 261 at [3] and 1 more values"),
    ([np.array([1, 2**24 + 1])], FP32, "16777217 at [0, 1]"),
    ([np.int64(2**24 + 1), 1.5], FP32, "16777217 at [0]"),
    (np.array([0.5, 2**53 + 1], object), FP64, "9007199254740993 at [1]"),
]


@pytest.mark.parametrize(("values", "datatype"), EXACT)
def test_integers_of_python_that_are_exact(client: Any, values: Any, datatype: dragoman.Datatype) -> None:
    for cast in (False, True):
        back = sent(client, values, datatype, cast=cast).data
        assert back.tolist() == np.asarray(values, np.float64).astype(datatype.dtype).reshape(back.shape).tolist()


@pytest.mark.parametrize(("values", "datatype", "shown"), INEXACT)
def test_integers_of_python_are_not_rounded(client: Any, values: Any, datatype: dragoman.Datatype, shown: str) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        sent(client, values, datatype)
    assert str(caught.value).startswith(
        f"input '{datatype}': expected integers that {datatype} holds exactly, as those"
    )
    assert str(caught.value).endswith(f", got {shown}; cast=True rounds them")
    back = sent(client, values, datatype, cast=True).data
    assert back.tolist() == np.asarray(values, np.float64).astype(datatype.dtype).reshape(back.shape).tolist()


# --- cast ------------------------------------------------------------------------------------------------------


def test_cast_rounds_floats_to_nearest(client: Any) -> None:
    assert sent(client, np.array([0.1, 1e-60, np.inf]), FP32, cast=True).data.tolist() == [np.float32(0.1), 0, np.inf]
    assert sent(client, np.array([2**53 + 1], np.int64), FP64, cast=True).data.tolist() == [2.0**53]
    assert sent(client, np.array([1.00390625]), BF16, cast=True).data.tolist() == [1.0]


def test_cast_keeps_integers(client: Any) -> None:
    assert sent(client, np.array([3.0, -0.0]), INT32, cast=True).data.tolist() == [3, 0]
    assert sent(client, np.array([1.0, 0.0]), DATATYPES["BOOL"], cast=True).data.tolist() == [True, False]
    assert sent(client, np.array([2.0**63]), UINT64, cast=True).data.tolist() == [2**63]
    assert sent(client, [True, False], FP32, cast=True).data.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("array", "datatype", "message"),
    [
        (np.array([[1.0, 1e39], [-1e300, np.inf]]), FP32, "1e+39 at [0, 1], -1e+300 at [1, 0] do not fit into FP32"),
        (np.array([1.5, 2.0, np.nan]), INT64, "1.5 at [0], nan at [2] do not fit into INT64"),
        (np.array([2.0**63]), INT64, "9.223372036854776e+18 at [0] does not fit into INT64"),
        (np.array(2**64 - 1, np.uint64), INT64, "18446744073709551615 does not fit into INT64"),
        (np.arange(-5, 0), UINT8, "-5 at [0], -4 at [1], -3 at [2] and 2 more values do not fit into UINT8"),
        (np.array([2]), DATATYPES["BOOL"], "2 at [0] does not fit into BOOL"),
        (np.array([1e5]), FP16, "100000.0 at [0] does not fit into FP16"),
    ],
)
def test_cast_rejects_values_that_do_not_fit(
    client: Any, array: Any, datatype: dragoman.Datatype, message: str
) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        sent(client, array, datatype, cast=True)
    assert str(caught.value) == f"input '{datatype}': {message}"


def test_tensors_are_sent_unchanged(client: Any) -> None:
    with pytest.raises(errors.InvalidInput, match="expected datatype FP64, got FP32"):
        sent(client, dragoman.Tensor.of(np.array([1], np.float32)), FP64, cast=True)


@pytest.fixture(scope="module")
def clients(server: dragoman.Server) -> Iterator[tuple[dragoman.Client, dragoman.Client]]:
    with dragoman.Client(server.http_url) as rest, dragoman.Client(url_of(server, "grpc")) as rpc:
        yield rest, rpc


def sent_as_json(url: str, tensor: dragoman.Tensor) -> dragoman.Tensor:
    """Return a tensor that the same model receives and sends as JSON."""
    body = InferenceRequest(inputs=[RequestInput(str(tensor.datatype), tensor)]).to_json()
    with urlopen(f"{url}/v2/models/Typed/infer", body, timeout=30) as response:
        return InferenceResponse.from_json(response.read()).tensors[str(tensor.datatype)]


_ARRAYS = st.sampled_from([d.dtype for d in NUMBERS.values() if d is not BF16]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(max_dims=2, max_side=4))
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(array=_ARRAYS, target=st.sampled_from(sorted(NUMBERS)), cast=st.booleans())
def test_what_arrives_is_what_was_sent_or_an_error(clients: Any, array: Any, target: str, cast: bool) -> None:
    """REST in binary form and in JSON, and gRPC agree; without `cast`, and into integers, each number arrives as it
    is."""
    datatype, answers = NUMBERS[target], []
    for client in clients:
        try:
            answers.append(sent(client, array, datatype, cast=cast))
        except errors.InvalidInput as error:
            answers.append(str(error))
    first, second = answers
    if isinstance(first, str):
        assert second == first
        return
    assert first.datatype is second.datatype is datatype
    assert first.data.tobytes() == second.data.tobytes()
    if np.isfinite(first.data.astype(float)).all():  # JSON has no others
        as_json = sent_as_json(clients[0].url, first)
        assert as_json.datatype is datatype
        assert as_json.data.tobytes() == first.data.tobytes()
    exact = not cast or datatype.kind != "float"
    before = [int(v) if isinstance(v, int) else v for v in array.reshape(-1).tolist()]
    for old, new in zip(before, first.data.reshape(-1).tolist(), strict=True):
        if old != old:
            assert new != new
        elif exact:
            assert new == old
        else:
            assert new == (old if abs(old) == np.inf else datatype.dtype.type(old))
            assert np.isfinite(float(new)) or abs(old) == np.inf


# --- libraries ---------------------------------------------------------------------------------------------------


def test_tensors_of_torch(client: Any) -> None:
    torch = pytest.importorskip("torch")
    assert sent(client, torch.tensor([[2.0, 0.0]]), FP64).data.tolist() == [[2, 0]]
    assert sent(client, torch.ones(2, requires_grad=True) * 3, FP32).data.tolist() == [3, 3]
    assert sent(client, torch.tensor([1.5], dtype=torch.bfloat16), FP32).data.tolist() == [1.5]
    assert sent(client, torch.tensor([1.5], dtype=torch.bfloat16)[::1], BF16).datatype is BF16
    assert sent(client, [torch.ones(2), torch.zeros(2)], FP32).data.tolist() == [[1, 1], [0, 0]]
    assert client.infer("Rows", torch.ones(2, 3))["sum"].tolist() == [3, 3]
    with pytest.raises(errors.InvalidInput, match=r"input 'FP32': a torch\.Tensor cannot be converted"):
        sent(client, torch.ones(2, 2).to_sparse(), FP32)
    with pytest.raises(errors.InvalidInput, match="expected arrays of equal shapes"):
        sent(client, [torch.ones(2), torch.ones(3)], FP32)


def test_arrays_of_jax(client: Any) -> None:
    jax = pytest.importorskip("jax")
    assert sent(client, jax.numpy.ones((1, 2)), FP64).data.tolist() == [[1, 1]]
    assert sent(client, jax.numpy.ones(1, jax.numpy.bfloat16), BF16).data.tolist() == [1]


class Exported:
    """An array that is known by DLPack only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class OnDevice:
    """An array of a GPU as CuPy has it: not converted implicitly."""

    __cuda_array_interface__: Any = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def get(self) -> Any:
        return np.array([4], np.float32)


class Broken:
    """An array that cannot be exported."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ValueError("no")


def test_arrays_by_protocol(client: Any) -> None:
    assert sent(client, Exported(np.array([1, 2], np.float32)), FP64).data.tolist() == [1, 2]
    assert sent(client, OnDevice(), FP32).data.tolist() == [4]
    with pytest.raises(errors.InvalidInput, match=r"Broken cannot be converted to a NumPy array \(no\): convert it"):
        sent(client, Broken(), FP32)
    with pytest.raises(errors.InvalidInput, match="expected numbers, text or bytes"):
        sent(client, SimpleNamespace(), FP32)


def test_masked_arrays_are_rejected(client: Any) -> None:
    with pytest.raises(errors.InvalidInput, match="input 'FP32': masked arrays are not supported: fill the array"):
        sent(client, np.ma.masked_array(np.array([1, 2], np.float32), [True, False]), FP32)


def test_no_framework_is_imported() -> None:
    code = "import sys, dragoman; dragoman.Client('http://127.0.0.1:1'); " + (
        "print([m for m in ('pandas', 'torch', 'jax', 'PIL', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
