"""Calls bound to signatures: order, shapes, outputs, raw binary requests, and the message for each mismatch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dragoman.core.binding import bind
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BOOL, BYTES, FP32, INT64
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import OPEN, Signature, TensorSpec
from dragoman.core.tensor import Tensor

X = TensorSpec("x", FP32, (-1, 2))
N = TensorSpec("n", INT64, (-1,))
FREE = TensorSpec("free", optional=True)
Y = TensorSpec("y", FP32, (-1,))
Z = TensorSpec("z", FP32, (-1,), optional=True)
ONE = Signature((X,), (Y,))
TWO = Signature((X, N), (Y, Z), batched=True)


def floats(*shape: int, **parameters: Any) -> Tensor:
    return Tensor(np.zeros(shape, np.float32), FP32, parameters)


def integers(*shape: int, **parameters: Any) -> Tensor:
    return Tensor(np.zeros(shape, np.int64), INT64, parameters)


def message(inputs: Mapping[str, Tensor], signature: Signature, **fields: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        bind(Infer(dict(inputs), **fields), signature, "m")
    return caught.value.message


def test_inputs_are_in_the_order_of_the_signature() -> None:
    bound = bind(Infer({"n": integers(3), "x": floats(3, 2)}), TWO, "m")
    assert list(bound.inputs) == ["x", "n"]
    partly_open = Signature((X, N), open_inputs=True, open_outputs=True)
    bound = bind(Infer({"b": floats(1), "n": integers(3), "a": floats(1), "x": floats(4, 2)}), partly_open, "m")
    assert list(bound.inputs) == ["x", "n", "b", "a"]


def test_a_matching_call_is_returned_unchanged() -> None:
    for call, signature in (
        (Infer({"x": floats(5, 2)}), ONE),
        (Infer({"x": floats(5, 2)}, ("y",)), ONE),
        (Infer({"x": floats(3, 2), "n": integers(3)}), TWO),
        (Infer({"anything": floats(1, 2, 3)}), OPEN),
    ):
        assert bind(call, signature, "m") is call


@pytest.mark.parametrize(
    ("inputs", "signature", "fields", "expected"),
    [
        ({"x": floats(1, 3)}, ONE, {}, "input 'x': expected shape [-1, 2], got [1, 3]"),
        ({"x": floats(2)}, ONE, {}, "input 'x': expected shape [-1, 2], got [2]"),
        ({"x": integers(1, 2)}, ONE, {}, "input 'x': expected datatype FP32, got INT64"),
        (
            {"x": floats(1, 2), "v": floats(1)},
            ONE,
            {},
            "unexpected inference input 'v' for model 'm'; expected 'x'",
        ),
        ({"v": floats(1)}, Signature((), (Y,)), {}, "unexpected inference input 'v' for model 'm'; expected none"),
        (
            {"x": floats(1, 2)},
            TWO,
            {},
            "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['x'], but missing "
            "required input(s) ['n']. Please provide all required input(s).",
        ),
        (
            {},
            TWO,
            {},
            "expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing "
            "required input(s) ['x','n']. Please provide all required input(s).",
        ),
        (
            {"free": floats(1)},
            Signature((X, FREE), (Y,)),
            {},
            "expected number of inputs between 1 and 2 but got 1 inputs for model 'm'. Got input(s) ['free'], but "
            "missing required input(s) ['x']. Please provide all required input(s).",
        ),
        (
            {},
            Signature((X, FREE), (Y,)),
            {},
            "expected number of inputs between 1 and 2 but got 0 inputs for model 'm'. Got input(s) [], but "
            "missing required input(s) ['x']. Please provide all required input(s).",
        ),
        (
            {"x": floats(3, 2), "n": integers(4)},
            TWO,
            {},
            "inputs of one batch need the same number of rows, got {'x': 3, 'n': 4}",
        ),
        (
            {"v": floats()},
            Signature((TensorSpec("v"),), (Y,), batched=True),
            {},
            "input 'v': expected a batch axis, got shape []",
        ),
        ({"x": floats(1, 2)}, ONE, {"outputs": ("y", "y")}, "output 'y' already exists in request"),
        (
            {"x": floats(1, 2)},
            ONE,
            {"outputs": ("w",)},
            "unexpected inference output 'w' for model 'm'; expected 'y'",
        ),
        (
            {"x": floats(3, 2), "n": integers(3)},
            TWO,
            {"outputs": ("y", "w")},
            "unexpected inference output 'w' for model 'm'; expected 'y', 'z'",
        ),
    ],
)
def test_mismatches_are_rejected_with_the_name_of_the_tensor(
    inputs: Mapping[str, Tensor], signature: Signature, fields: dict[str, Any], expected: str
) -> None:
    assert message(inputs, signature, **fields) == expected


def test_optional_inputs_and_accepted_datatypes() -> None:
    wide = Signature((TensorSpec("x", FP32, (-1, 2), accepts=frozenset({INT64})), FREE), (Y,))
    call = Infer({"x": integers(1, 2)})
    assert bind(call, wide, "m") is call
    call = Infer({"free": floats(7), "x": integers(1, 2)})
    assert list(bind(call, wide, "m").inputs) == ["x", "free"]


def test_a_column_with_a_content_type_is_flattened_for_an_input_of_one_axis() -> None:
    signature = Signature((N, X), (Y,))
    columns = {"n": integers(3, 1, content_type="np"), "x": floats(3, 2, content_type="np")}
    bound = bind(Infer(columns), signature, "m").inputs
    assert bound["n"].shape == (3,)
    assert bound["n"].parameters == {"content_type": "np"}
    assert bound["x"].shape == (3, 2)
    assert message({**columns, "n": integers(3, 1)}, signature) == "input 'n': expected shape [-1], got [3, 1]"
    assert message({**columns, "n": integers(3, 1, other=1)}, signature) == "input 'n': expected shape [-1], got [3, 1]"
    two = integers(3, 2, content_type="np")
    assert message({**columns, "n": two}, signature) == "input 'n': expected shape [-1], got [3, 2]"


def test_calls_that_a_codec_decodes_are_not_checked() -> None:
    decodes = Signature((X,), (Y,), decodes=True)
    other = {"column": integers(1)}
    by_call = Infer(other, parameters={"content_type": "pd"})
    assert bind(by_call, decodes, "m") is by_call
    assert message(other, decodes, parameters={"content_type": "pd"}, outputs=("w",)).startswith("unexpected inference")
    by_model = Infer(other)
    assert bind(by_model, Signature((X,), (Y,), decodes=True, content_type="pd"), "m") is by_model
    assert "unexpected inference input 'column'" in message(other, decodes)
    assert "unexpected inference input 'column'" in message(other, ONE, parameters={"content_type": "pd"})
    plain = Infer({"x": floats(1, 2)}, parameters={"content_type": "pd"})
    assert bind(plain, ONE, "m") is plain


def test_an_unchecked_signature_accepts_any_call() -> None:
    call = Infer({"anything": integers(1)}, ("any", "other"))
    assert bind(call, Signature((X,), (Y,), unchecked=True), "m") is call


def raw(content: bytes, spec: TensorSpec, **options: Any) -> Tensor:
    return bind(Infer({}, raw=content), Signature((spec,), (Y,), **options), "m").inputs[spec.name]


def raw_message(content: bytes, *specs: TensorSpec, **options: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        bind(Infer({}, raw=content), Signature(specs, (Y,), **options), "m")
    return caught.value.message


def test_raw_bytes_take_the_shape_of_the_only_input() -> None:
    numbers = np.arange(6, dtype=np.float32)
    assert raw(numbers.tobytes(), X).data.tolist() == numbers.reshape(3, 2).tolist()
    assert raw(b"", X).shape == (0, 2)
    assert raw(numbers.tobytes(), TensorSpec("x", FP32, (2, 3))).shape == (2, 3)
    assert raw(numbers.tobytes(), TensorSpec("x", FP32, (-1, 2, -1))).shape == (1, 2, 3)
    assert raw(b"\0\1\1", TensorSpec("b", BOOL, (-1,))).data.tolist() == [False, True, True]
    assert raw(b"", TensorSpec("b", BOOL, (-1,))).shape == (0,)
    text = raw(b"\0\xff", TensorSpec("t", BYTES, (1, 1)))
    assert text.data.tolist() == [[b"\0\xff"]]
    assert not text.data.flags.writeable
    assert bind(Infer({}, raw=b""), Signature((X,), (Y,)), "m").raw is None


@pytest.mark.parametrize(
    ("content", "specs", "expected"),
    [
        (
            b"",
            (X, N),
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model: 'x', 'n'",
        ),
        (b"", (), "Raw request must only have 1 input (found 1) to be deduced but got 0 inputs in 'm' model: none"),
        (
            b"",
            (TensorSpec("x", FP32),),
            "a raw binary request needs the datatype and shape of input 'x' to be known",
        ),
        (
            b"",
            (TensorSpec("x", None, (1,)),),
            "a raw binary request needs the datatype and shape of input 'x' to be known",
        ),
        (b"1234", (X,), "input 'x': 4 bytes do not fill shape [-1, 2] of FP32"),
        (b"1234", (TensorSpec("x", FP32, (0, -1)),), "input 'x': 4 bytes do not fill shape [0, -1] of FP32"),
        (b"12345678", (TensorSpec("x", FP32, (1,)),), "input 'x': 8 bytes do not fill shape [1] of FP32"),
        (
            b"1234",
            (TensorSpec("x", FP32, (2, -1, -1)),),
            "The shape of the raw input 'x' can not be deduced because there are more than one "
            "variable-sized dimension, got [2, -1, -1]",
        ),
        (
            b"1234",
            (TensorSpec("x", FP32, (-1, -1, -1)),),
            "The shape of the raw input 'x' can not be deduced because there are more than one "
            "variable-sized dimension, got [1, -1, -1]",
        ),
        (b"\0\2", (TensorSpec("b", BOOL, (-1,)),), "input 'b': expected BOOL bytes of 0 or 1, got 2"),
    ],
)
def test_raw_bytes_of_another_size_are_rejected(content: bytes, specs: tuple[TensorSpec, ...], expected: str) -> None:
    assert raw_message(content, *specs) == expected


def test_raw_bytes_need_a_model_without_open_inputs() -> None:
    assert "needs a model of one input" in raw_message(b"12345678", X, open_inputs=True)


def test_a_matching_call_with_outputs_or_parameters_is_returned_unchanged() -> None:
    two = Signature((X, N), (Y, Z))
    both = {"x": floats(5, 2), "n": integers(7)}
    for call, signature in [
        (Infer({"x": floats(5, 2)}), ONE),
        (Infer({"x": floats(5, 2, a=1)}), ONE),
        (Infer(both), two),
        (Infer(both, ("z",)), two),
        (Infer(both, ("y", "z")), two),
        (Infer(both, parameters={"a": 1}), two),
    ]:
        assert bind(call, signature, "m") is call


def test_shapes_that_fit_a_tensor_spec() -> None:
    spec = TensorSpec("x", FP32, (-1, 2, 3))
    assert spec.fixed == ((1, 2), (2, 3))
    assert [spec.fits(shape) for shape in ((9, 2, 3), (9, 2, 4), (9, 3, 3), (2, 3), (1, 2, 3, 1))] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert TensorSpec("x").fits((1, 2, 3))


def test_derived_fields_of_a_signature() -> None:
    assert (TWO.output_names, TWO.default_outputs) == (("y", "z"), frozenset({"y"}))
    assert TWO.input("n") is N
    assert TWO.output("z") is Z
    assert TWO.input("y") is None
    assert (ONE.sole, TWO.sole) == (Y, None)
    assert Signature((X,), (Z,)).sole is None
    assert Signature((X,), (Y,), unchecked=True).sole is None
    assert repr(ONE).endswith("content_type='', unchecked=False, outputs_are_hints=False)")  # no derived fields
