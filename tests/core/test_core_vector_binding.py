"""Vector calls bound to signatures: positions become names; wrong counts, lengths, datatypes, indices are rejected."""

from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import ApplyHessian, ApplyJacobian, Gradient, Infer, Inference
from dragoman.core.datatypes import FP32, FP64, INT64
from dragoman.core.errors import InvalidInput, InvalidOutput, NotSupported
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.core.vector_binding import (
    VectorSignature,
    bind_derivative,
    bind_evaluation,
    check_answer,
    config_in,
    config_key,
    require_finite,
    vector_signature,
)

A = TensorSpec("a", FP64, (2,))
B = TensorSpec("b", FP32, (3,))
U = TensorSpec("u", FP64, (1,))
V = TensorSpec("v", FP64, (4,))
SIGNATURE = Signature((A, B), (U, V))


def vectors_of(signature: Signature) -> VectorSignature:
    vectors = vector_signature(signature)
    assert vectors is not None
    return vectors


VECTORS = vectors_of(SIGNATURE)
ROWS = vectors_of(Signature((TensorSpec("x", FP32, (-1, 2)),), (TensorSpec("y", FP64, (-1,)),), batched=True))
PLAIN = vectors_of(Signature((A,), (U,)))


def vector(*numbers: float) -> Tensor:
    return Tensor(np.array(numbers, np.float64), FP64)


def message(call: Any, of: VectorSignature | None = VECTORS, error: type[Exception] = InvalidInput) -> str:
    bind = bind_evaluation if isinstance(call, Infer) else bind_derivative
    with pytest.raises(error) as caught:
        bind(call, of, "m")
    return str(caught.value)


def test_a_model_of_float_vectors_has_a_vector_signature() -> None:
    assert [(s.name, s.size, s.shape, s.datatype) for s in VECTORS.inputs] == [
        ("a", 2, (2,), FP64),
        ("b", 3, (3,), FP32),
    ]
    assert [(s.name, s.size, s.shape, s.datatype) for s in VECTORS.outputs] == [
        ("u", 1, (1,), FP64),
        ("v", 4, (4,), FP64),
    ]
    assert [(s.name, s.size, s.shape) for s in (*ROWS.inputs, *ROWS.outputs)] == [("x", 2, (1, 2)), ("y", 1, (1,))]
    assert VECTORS.input("b").size == 3
    assert VECTORS.output("v").size == 4
    optional = TensorSpec("o", INT64, optional=True)
    assert vectors_of(Signature((A, optional), (U, optional))) == VectorSignature(
        VECTORS.inputs[:1], VECTORS.outputs[:1]
    )
    assert vectors_of(Signature((), (U,))) == VectorSignature((), VECTORS.outputs[:1])


@pytest.mark.parametrize(
    "signature",
    [
        Signature((A,), ()),
        Signature((A,), (TensorSpec("o", FP64, (1,), optional=True),)),
        Signature((A,), (U,), open_inputs=True),
        Signature((A,), (U,), open_outputs=True),
        Signature((A,), (U,), unchecked=True),
        Signature((TensorSpec("a", INT64, (2,)),), (U,)),
        Signature((TensorSpec("a", FP64),), (U,)),
        Signature((TensorSpec("a", FP64, (2, 2)),), (U,)),
        Signature((TensorSpec("a", FP64, ()),), (U,)),
        Signature((TensorSpec("a", FP64, (-1,)),), (U,)),
        Signature((A,), (TensorSpec("o", FP64, (-1,)),)),
        Signature((TensorSpec("a", FP64, (-1, 2, 2)),), (TensorSpec("y", FP64, (-1,)),), batched=True),
        Signature((TensorSpec("a", FP64, (-1, -1)),), (TensorSpec("y", FP64, (-1,)),), batched=True),
        Signature((TensorSpec("a", FP64, (3, 2)),), (TensorSpec("y", FP64, (-1,)),), batched=True),
    ],
)
def test_other_models_have_no_vector_signature(signature: Signature) -> None:
    assert vector_signature(signature) is None


NOT_SUPPORTED = (
    "model 'm' does not support Evaluate: not all its tensors are float vectors of known sizes; "
    "for a Python function declare them by @dragoman.vector_function(inputs={...})"
)


def test_other_models_do_not_support_vector_calls() -> None:
    assert message(Infer({}, positional=()), None, NotSupported) == NOT_SUPPORTED
    assert message(Gradient(sens=vector(1)), None, NotSupported) == NOT_SUPPORTED


def test_positions_become_names() -> None:
    call = Infer(
        {}, ("u",), {"p": 1}, positional=(vector(1, 2), vector(3, 4, 5)), config={"c": 1}, content_types={"u": 1}
    )
    bound = bind_evaluation(call, VECTORS, "m")
    assert {n: (t.data.tolist(), t.datatype) for n, t in bound.inputs.items()} == {
        "a": ([1, 2], FP64),
        "b": ([3, 4, 5], FP32),
    }
    assert (bound.outputs, bound.parameters, bound.config, bound.content_types) == (
        ("u",),
        {"p": 1},
        {"c": 1},
        {"u": 1},
    )
    assert (bound.raw, bound.positional) == (None, None)
    x = vector(1, 2)
    assert bind_evaluation(Infer({}, positional=(x,)), PLAIN, "m").inputs["a"] is x
    row = bind_evaluation(Infer({}, positional=(x,)), ROWS, "m").inputs["x"]
    assert (row.data.tolist(), row.datatype) == ([[1, 2]], FP32)
    without_inputs = vectors_of(Signature((), (U,)))
    assert bind_evaluation(Infer({}), without_inputs, "m").inputs == {}


@pytest.mark.parametrize(
    ("positional", "expected"),
    [
        ((), "expected 2 input vectors for model 'm' ('a' of 2, 'b' of 3), got 0"),
        ((vector(1, 2),), "expected 2 input vectors for model 'm' ('a' of 2, 'b' of 3), got 1"),
        ((vector(1), vector(1, 2, 3)), "input 0 ('a'): expected 2 numbers, got 1"),
        ((vector(1, 2), Tensor.of(np.zeros((3, 1)))), "input 1 ('b'): expected 3 numbers, got shape [3, 1]"),
        ((vector(1, 2), vector(1, 2, 1e300)), "input 'b': 1e+300 does not fit into FP32"),
    ],
)
def test_invalid_positions_are_rejected(positional: tuple[Tensor, ...], expected: str) -> None:
    assert message(Infer({}, positional=positional)) == expected


INPUTS = (vector(1, 2), vector(3, 4, 5))


def test_positions_of_derivatives_become_names() -> None:
    gradient = bind_derivative(
        Gradient(positional=INPUTS, output=1, input=1, sens=vector(1, 2, 3, 4), config={"c": 1}), VECTORS, "m"
    )
    assert isinstance(gradient, Gradient)
    assert (gradient.output, gradient.input, gradient.config) == ("v", "b", {"c": 1})
    assert gradient.sens.data.tolist() == [1, 2, 3, 4]
    assert [t.data.tolist() for t in gradient.inputs.values()] == [[1, 2], [3, 4, 5]]
    jacobian = bind_derivative(
        ApplyJacobian(positional=INPUTS, output="u", input="a", vec=vector(6, 7), config={"c": 1}), VECTORS, "m"
    )
    assert isinstance(jacobian, ApplyJacobian)
    assert (jacobian.output, jacobian.input, jacobian.vec.data.tolist(), jacobian.config) == (
        "u",
        "a",
        [6, 7],
        {"c": 1},
    )
    hessian = bind_derivative(
        ApplyHessian(positional=INPUTS, output=0, input1=0, input2=1, sens=vector(9), vec=vector(1, 2, 3)), VECTORS, "m"
    )
    assert isinstance(hessian, ApplyHessian)
    assert (hessian.output, hessian.input1, hessian.input2, hessian.positional) == ("u", "a", "b", None)
    assert (hessian.sens.data.tolist(), hessian.vec.data.tolist()) == ([9], [1, 2, 3])
    assert list(hessian.inputs) == ["a", "b"]


def test_vectors_of_a_derivative_may_be_a_row_or_single_precision() -> None:
    row = Tensor(np.array([[3, 4, 5]], np.float32), FP32)
    bound = bind_derivative(Gradient(inputs={"b": row, "a": vector(1, 2)}, sens=vector(1)), VECTORS, "m")
    assert list(bound.inputs) == ["a", "b"]
    assert (bound.inputs["b"].data.tolist(), bound.inputs["b"].datatype, bound.inputs["b"].data.dtype) == (
        [3, 4, 5],
        FP64,
        np.dtype(np.float64),
    )
    x = vector(1, 2)
    assert bind_derivative(Gradient(positional=(x,), sens=vector(1)), PLAIN, "m").inputs["a"] is x


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            Gradient(positional=INPUTS, output=2, sens=vector(1)),
            "output (outWrt): expected an index from 0 to 1, got 2",
        ),
        (
            Gradient(positional=INPUTS, output=-1, sens=vector(1)),
            "output (outWrt): expected an index from 0 to 1, got -1",
        ),
        (
            Gradient(positional=INPUTS, output="w", sens=vector(1)),
            "output (outWrt): expected one of 'u' of 1, 'v' of 4, got 'w'",
        ),
        (Gradient(positional=INPUTS, input=2, sens=vector(1)), "input (inWrt): expected an index from 0 to 1, got 2"),
        (
            ApplyJacobian(positional=INPUTS, input="w", vec=vector(1)),
            "input (inWrt): expected one of 'a' of 2, 'b' of 3, got 'w'",
        ),
        (
            ApplyHessian(positional=INPUTS, input1=2, sens=vector(1), vec=vector(1, 2)),
            "input1 (inWrt1): expected an index from 0 to 1, got 2",
        ),
        (
            ApplyHessian(positional=INPUTS, input2=2, sens=vector(1), vec=vector(1, 2)),
            "input2 (inWrt2): expected an index from 0 to 1, got 2",
        ),
        (Gradient(positional=INPUTS, sens=vector(1, 2)), "sens, for output 'u': expected 1 numbers, got 2"),
        (ApplyJacobian(positional=INPUTS, vec=vector(1)), "vec, for input 'a': expected 2 numbers, got 1"),
        (
            ApplyHessian(positional=INPUTS, input2=1, sens=vector(1), vec=vector(1)),
            "vec, for input 'b': expected 3 numbers, got 1",
        ),
        (
            ApplyHessian(positional=INPUTS, output=1, sens=vector(1), vec=vector(1, 2)),
            "sens, for output 'v': expected 4 numbers, got 1",
        ),
        (Gradient(positional=INPUTS, sens=vector(np.nan)), "sens[0]: expected a finite number, got nan"),
        (ApplyJacobian(positional=INPUTS, vec=vector(1, -np.inf)), "vec[1]: expected a finite number, got -inf"),
        (
            ApplyHessian(positional=INPUTS, sens=vector(np.inf), vec=vector(1, 2)),
            "sens[0]: expected a finite number, got inf",
        ),
        (
            ApplyHessian(positional=INPUTS, sens=vector(1), vec=vector(1, np.nan)),
            "vec[1]: expected a finite number, got nan",
        ),
        (
            Gradient(positional=INPUTS, sens=Tensor.of([1])),
            "sens, for output 'u': expected datatype FP64, got INT64",
        ),
        (
            Gradient(positional=INPUTS, output=1, sens=Tensor.of(np.zeros((2, 2)))),
            "sens, for output 'v': expected 4 numbers, got shape [2, 2]",
        ),
        (
            Gradient(inputs={"a": INPUTS[0], "c": INPUTS[1]}, sens=vector(1)),
            "unexpected input 'c' for model 'm'; expected 'a' of 2, 'b' of 3",
        ),
        (
            Gradient(inputs={"a": INPUTS[0]}, sens=vector(1)),
            "expected 2 input vectors for model 'm' ('a' of 2, 'b' of 3), got 1",
        ),
        (
            Gradient(inputs={"a": INPUTS[1], "b": INPUTS[1]}, sens=vector(1)),
            "input 'a': expected 2 numbers, got 3",
        ),
        (
            Gradient(positional=INPUTS[:1], sens=vector(1)),
            "expected 2 input vectors for model 'm' ('a' of 2, 'b' of 3), got 1",
        ),
    ],
)
def test_invalid_derivative_calls_are_rejected(call: Any, expected: str) -> None:
    assert message(call) == expected


def test_an_index_is_rejected_if_the_model_has_no_inputs() -> None:
    without_inputs = vectors_of(Signature((), (U,)))
    call = Gradient(positional=(), sens=vector(1))
    assert message(call, without_inputs) == "input (inWrt): expected none, since the model has none, got 0"
    assert message(Gradient(positional=(vector(1),), sens=vector(1)), without_inputs) == (
        "expected 0 input vectors for model 'm' (none), got 1"
    )


def test_a_config_may_be_json_text_or_an_object() -> None:
    for config in ('{"level": 2}', {"level": 2}):
        call = config_in(Infer({}, parameters={"config": config, "other": 1}))  # type: ignore[dict-item]
        assert (call.config, call.parameters) == ({"level": 2}, {"other": 1})
    assert config_in(Infer({}, parameters={"config": "{}"}, config={"a": 1})).config == {"a": 1}


@pytest.mark.parametrize("text", ["[1]", "1", "x" * 200, 3, "{" * 99, "[" * 100_000])
def test_a_config_that_is_not_an_object_is_rejected(text: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        config_in(Infer({}, parameters={"config": text}))
    expected = f"parameter 'config': expected JSON text of an object, got {text!r:.100}"
    assert caught.value.message.startswith(expected)
    assert len(caught.value.message) < 300


def test_equal_configs_have_equal_keys() -> None:
    assert config_key({"a": 1, "b": [2]}) == config_key({"b": [2], "a": 1}) == '{"a": 1, "b": [2]}'
    assert config_key({}) == ""
    assert config_key({"a": 1}) != config_key({"a": 2})
    assert config_key({"a": {1}}) == '{"a": "{1}"}'


def test_results_are_checked_against_the_signature() -> None:
    good = Inference({"u": vector(1), "extra": vector(1, 2, 3)})
    check_answer(good, Infer({}), SIGNATURE, VECTORS)
    with pytest.raises(InvalidOutput, match=r"^output 'v': expected shape \[4\], got \[1\]$"):
        check_answer(Inference({"v": vector(1)}), Infer({}), SIGNATURE, VECTORS)
    sens, vec = vector(1), vector(1, 2)
    for call, right, wrong in (
        (Gradient(output="v", input="b", sens=sens), 3, "Gradient: expected 3 numbers, as input 'b' has, got 5"),
        (
            ApplyJacobian(output="v", input="b", vec=vec),
            4,
            "ApplyJacobian: expected 4 numbers, as output 'v' has, got 5",
        ),
        (
            ApplyHessian(output="v", input1="a", input2="b", sens=sens, vec=vec),
            2,
            "ApplyHessian: expected 2 numbers, as input 'a' has, got 5",
        ),
    ):
        check_answer(vector(*range(right)), call, SIGNATURE, VECTORS)
        with pytest.raises(InvalidOutput) as caught:
            check_answer(vector(*range(5)), call, SIGNATURE, VECTORS)
        assert caught.value.message == wrong


def test_the_first_non_finite_number_is_named() -> None:
    many = np.zeros((2, 1_200_000))
    require_finite(many, "x")
    many[1, 7] = many[1, 9] = np.inf
    with pytest.raises(InvalidInput, match=r"^x\[1200007\]: expected a finite number, got inf$"):
        require_finite(many, "x")
