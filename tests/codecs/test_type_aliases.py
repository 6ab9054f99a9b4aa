"""Type aliases in annotations mean what they stand for: `type Vector = ...`, and `NDArray` of NumPy 2.5 and newer."""
# mypy: disable-error-code="valid-type, misc"

import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar

import numpy as np
import pytest
import typing_extensions
from numpy.typing import NDArray

from dragoman.codecs.annotations import Shape
from dragoman.codecs.codec import CODECS, InputCodec
from dragoman.codecs.typed import TypedFunction
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES, FP32, FP64, INT64
from dragoman.core.errors import ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.core.type_aliases import without_aliases
from dragoman_mlserver.mlserver.codecs.decorator import decode_args
from dragoman_mlserver.mlserver.types import InferenceRequest
from dragoman_simulators.derivatives.vector_callable import annotated_inputs, inspect_function

S, T, U = TypeVar("S", bound=np.generic), TypeVar("T"), TypeVar("U")

# The two classes that make aliases: the one of `type X = ...`, which Python 3.11 lacks, and its backport.
MAKERS = list(filter(None, (getattr(module, "TypeAliasType", None) for module in (typing, typing_extensions))))


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__module__)
def alias(request: pytest.FixtureRequest) -> Callable[..., Any]:
    def make(name: str, value: Any, *parameters: Any) -> Any:
        return request.param(name, value, type_params=parameters)

    return make


def _array_alias(alias: Callable[..., Any]) -> Any:
    """`NDArray` as NumPy 2.5 defines it: an alias whose value contains another one."""
    return alias("NDArray", np.ndarray[alias("AnyShape", tuple[Any, ...]), np.dtype[S]], S)


def test_generic_array_aliases(alias: Callable[..., Any]) -> None:
    array = _array_alias(alias)
    vector = alias("Vector", Annotated[array[np.float32], Shape(3)])

    def f(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return a

    f.__annotations__ |= {
        "a": array[np.float64],
        "b": vector,
        "c": array[np.int64] | None,
        "d": array[Any],
        "e": array,
        "return": array[np.float64],
    }
    signature = TypedFunction(f).signature
    assert signature.inputs == (
        TensorSpec("a", FP64),
        TensorSpec("b", FP32, (3,)),
        TensorSpec("c", INT64, optional=True),
        TensorSpec("d"),
        TensorSpec("e"),
    )
    assert signature.outputs == (TensorSpec("output-0", FP64),)


def test_aliases_inside_other_annotations(alias: Callable[..., Any]) -> None:
    number, numbers = alias("Number", float), alias("Numbers", list[T], T)

    class Fields(TypedDict):
        label: str
        score: float

    Fields.__annotations__ |= {"label": alias("Label", str), "score": NotRequired[number]}

    def f(x: Any, y: Any) -> Any:
        yield {"label": "a", "score": sum(x) + y}

    f.__annotations__ |= {"x": numbers[number], "y": alias("Maybe", number | None), "return": Iterator[Fields]}
    typed = TypedFunction(f)
    x, y = typed.signature.inputs
    assert (x, y.datatype, y.optional) == (TensorSpec("x", FP64, (-1,), x.accepts), FP64, True)
    assert [(o.name, o.datatype) for o in typed.signature.outputs] == [("label", BYTES), ("score", FP64)]
    chunks: Any = typed.infer(Infer({"x": Tensor.of([1.0, 2.0]), "y": Tensor.of([0.5])}))
    (chunk,) = chunks
    assert chunk["score"].data.tolist() == [3.5]


def test_arguments_of_generic_aliases(alias: Callable[..., Any]) -> None:
    swapped = alias("Swapped", tuple[U, T], T, U)
    assert without_aliases(swapped[int, str]) == tuple[str, int]
    assert without_aliases(alias("Same", T, T)[int]) is int
    assert without_aliases(alias("Unused", float, T)[int]) is float
    assert without_aliases(alias("Outer", list[swapped[T, int]], T)[str]) == list[tuple[int, str]]
    with pytest.raises(TypeError):
        without_aliases(swapped[int])


def test_annotations_without_aliases_are_unchanged() -> None:
    for annotation in (Annotated[float, "note"], Literal["a", 1], float | None, dict[str, Any], NDArray[np.float32], 3):
        found = without_aliases(annotation)
        assert found is annotation or hasattr(NDArray, "__value__")
    assert without_aliases(Annotated[float, MAKERS]) == Annotated[float, MAKERS]


def test_an_alias_as_type_hint_of_a_codec(alias: Callable[..., Any]) -> None:
    user = alias("User", str)

    class UserCodec(InputCodec):
        content_type = "test-user"
        type_hint = user
        datatype = BYTES

        @classmethod
        def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
            return f"user {tensor.data[0].decode()}"

    def f(x: Any, y: Any) -> Any:
        return np.array([x, y])

    f.__annotations__ |= {"x": user, "y": str}
    CODECS.add(UserCodec)
    try:
        result: Any = TypedFunction(f).infer(Infer({"x": Tensor.of(["a"]), "y": Tensor.of(["b"])}))
    finally:
        CODECS.remove("test-user")
    assert result.tolist() == ["user a", "b"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="only `type X = ...` can refer to itself")
def test_an_alias_that_cannot_be_evaluated_is_an_error() -> None:
    scope: dict[str, Any] = {}
    exec("type Tree = list[Tree]\ntype Missing = list[Nowhere]", scope)

    def f(x: Any) -> float:
        return 0.0

    for name, message in (("Tree", "type alias 'Tree' refers to itself"), ("Missing", "Nowhere")):
        f.__annotations__["x"] = scope[name]
        with pytest.raises(ModelFailed, match=f"annotations of .* cannot be evaluated: .*{message}"):
            TypedFunction(f)


def test_fields_whose_annotations_cannot_be_evaluated_are_named() -> None:
    @dataclass
    class Point:
        x: "Nowhere"  # type: ignore[name-defined] # noqa: F821

    def f(x: float) -> Point:
        return Point(x)

    with pytest.raises(ModelFailed, match=r"annotations of .*Point, the result of .*Nowhere"):
        TypedFunction(f)


def test_aliases_of_vectors_with_sizes(alias: Callable[..., Any]) -> None:
    def f(x: Any, y: Any) -> Any:
        return x

    f.__annotations__ |= {"x": alias("Two", Annotated[_array_alias(alias)[np.float64], Shape(2)])}
    f.__annotations__ |= {"y": alias("Sized", Annotated[T, Shape(3)], T)[np.ndarray]}
    assert annotated_inputs(inspect_function(f)) == (2, 3)


async def test_methods_of_mlserver_models(alias: Callable[..., Any]) -> None:
    class Model:
        name, version, inputs = "m", "", ()

        async def predict(self, x, y):  # type: ignore[no-untyped-def]
            return x, [*y, "c"]

    annotations = Model.predict.__annotations__
    array, texts = _array_alias(alias), alias("Texts", list[T], T)
    annotations |= {"x": array[np.float64], "y": texts[str] | None, "return": tuple[array[np.float64], texts[str]]}
    request = InferenceRequest(
        inputs=[
            {"name": "x", "shape": [2], "datatype": "FP64", "data": [1.5, 2.5]},
            {"name": "y", "shape": [1], "datatype": "BYTES", "data": ["b"]},
        ]
    )
    response = await decode_args(Model.predict)(Model(), request)
    first, second = response.outputs
    assert (first.datatype, list(first.data)) == ("FP64", [1.5, 2.5])
    assert (second.datatype, list(second.data)) == ("BYTES", ["b", "c"])
