"""Annotations give the signature and convert calls and results."""

import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from PIL import Image

from dragoman import codecs
from dragoman.codecs.annotations import Shape
from dragoman.codecs.decode import Defaults
from dragoman.codecs.typed import TypedFunction
from dragoman.core.calls import Infer, Inference
from dragoman.core.datatypes import BF16, BOOL, BYTES, FP16, FP32, FP64, INT32, INT64
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Parameters, Tensor

_NOT_GIVEN: Any = object()


def _infer(function: Any, _parameters: Any = None, **inputs: Any) -> Any:
    tensors = {name: value if isinstance(value, Tensor) else Tensor.of(value) for name, value in inputs.items()}
    return TypedFunction(function).infer(Infer(tensors, (), _parameters or {}))


def _output(result: Any) -> Tensor:
    (tensor,) = result
    assert isinstance(tensor, Tensor)
    return tensor


def test_arrays() -> None:
    def f(a: np.ndarray, b: NDArray[np.float32], c: Annotated[NDArray[np.int32], Shape(-1, 4)], d, e: Any):  # type: ignore[no-untyped-def]
        return a

    typed = TypedFunction(f)
    assert typed.signature.inputs == (
        TensorSpec("a"),
        TensorSpec("b", FP32),
        TensorSpec("c", INT32, (-1, 4)),
        TensorSpec("d"),
        TensorSpec("e"),
    )
    assert typed.signature.outputs == ()
    assert typed.signature.open_outputs
    assert not typed.signature.open_inputs
    rows = np.arange(3)
    assert _infer(f, a=rows, b=rows, c=rows, d=rows, e=rows) is rows


def test_abstract_number_types() -> None:
    def f(a: NDArray[np.floating[Any]], b: NDArray[np.integer[Any]], c: Annotated[np.ndarray, BF16], d: NDArray[Any]):  # type: ignore[no-untyped-def]
        return a

    a, b, c, d = TypedFunction(f).signature.inputs
    assert a.datatype is FP64
    assert a.accepts == {FP16, FP32}
    assert b.datatype is INT64
    assert len(b.accepts) == 7
    assert c == TensorSpec("c", BF16)
    assert d == TensorSpec("d")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    ("kind", "datatype", "value", "seen"),
    [
        (float, FP64, 1.5, 1.5),
        (int, INT64, 2**62 + 1, 2**62 + 1),
        (bool, BOOL, True, True),
        (str, BYTES, "ü\0", "ü\0"),
        (bytes, BYTES, b"\xff", b"\xff"),
        (np.float32, FP32, np.float32(0.1), np.float32(0.1)),
    ],
)
def test_single_values(kind: type, datatype: Any, value: Any, seen: Any, shape: tuple[int, ...]) -> None:
    received = []

    def f(x: Any) -> Any:
        received.append(x)
        return x

    f.__annotations__.update({"x": kind, "return": kind})
    typed = TypedFunction(f)
    (spec,) = typed.signature.inputs
    assert (spec.datatype, spec.shape, spec.optional) == (datatype, (1,), False)
    assert typed.signature.outputs == (TensorSpec("output-0", datatype, (1,)),)
    array = np.array([value], dtype=object if datatype is BYTES else None).reshape(shape)
    tensor = _output(_infer(f, x=array))
    assert received == [seen]
    assert type(received[0]) is kind
    assert (tensor.datatype, tensor.shape) == (datatype, (1,))
    assert tensor.data[0] == (value.encode() if isinstance(value, str) else value)


def test_invalid_single_values_are_rejected() -> None:
    def f(x: float) -> float:
        return x

    with pytest.raises(InvalidInput, match=r"'x': expected one value, got shape \[2\]"):
        _infer(f, x=[1.0, 2.0])
    with pytest.raises(InvalidInput, match=r"beyond 2\*\*53"):
        _infer(f, x=[2**53 + 1])
    assert _output(_infer(f, x=[2**53])).data.tolist() == [2.0**53]
    with pytest.raises(InvalidInput, match="'x': expected UTF-8 text"):
        _infer(_upper, x=np.array([b"\xff"], dtype=object))


def _upper(x: str) -> str:
    return x.upper()


def test_lists() -> None:
    def f(x: list[float], y: list[list[int]], z: list[str]) -> tuple[list[bytes], list[bool], list[list[int]]]:
        assert x == [1.0, 2.0]
        assert [type(each) for each in x] == [float, float]
        return [each.encode() for each in z], [True, False], y

    typed = TypedFunction(f)
    assert [spec.shape for spec in typed.signature.inputs] == [(-1,), (-1, -1), (-1,)]
    assert [spec.name for spec in typed.signature.outputs] == ["output-0", "output-1", "output-2"]
    text, flags, table = _infer(f, x=[1, 2], y=[[1, 2], [3, 4]], z=np.array(["a", "b\0"], dtype=object))
    assert text.data.tolist() == [b"a", b"b\0"]
    assert flags.datatype is BOOL
    assert table.data.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("kind", [float, int, str, bytes, bool])
def test_empty_lists(kind: Any) -> None:
    def f(x: Any) -> Any:
        return x

    f.__annotations__.update({"x": list[kind], "return": list[kind]})
    (spec,) = TypedFunction(f).signature.inputs
    assert spec.datatype is not None
    tensor = _output(_infer(f, x=Tensor(np.zeros(0, spec.datatype.dtype), spec.datatype)))
    assert (tensor.datatype, tensor.shape) == (spec.datatype, (0,))


def test_optional_inputs() -> None:
    def f(a: float, b: float = 2.0, c: float | None = None, d: int | None = _NOT_GIVEN, *, e: str | None) -> float:
        assert e is None
        return a * b if c is None else c

    assert [spec.optional for spec in TypedFunction(f).signature.inputs] == [False, True, True, True, True]
    assert _output(_infer(f, a=3.0)).data.tolist() == [6.0]
    assert _output(_infer(f, a=3.0, b=3.0)).data.tolist() == [9.0]
    assert _output(_infer(f, a=3.0, c=1.0)).data.tolist() == [1.0]


def test_annotations_for_parameters_call_and_other_inputs() -> None:
    def f(a: float, /, p: Parameters, complete: Infer, **others: Any) -> Any:
        return {"n": np.array([a, p["scale"], len(complete.inputs)]), **others}

    typed = TypedFunction(f)
    assert [spec.name for spec in typed.signature.inputs] == ["a"]
    assert typed.signature.open_inputs
    extra = np.arange(2)
    result = _infer(f, {"scale": 3}, a=2.0, extra=extra)
    assert result["n"].tolist() == [2, 3, 2]
    assert result["extra"] is extra


class Scores(TypedDict):
    label: str
    scores: NDArray[np.float32]


@dataclass
class Point:
    x: float
    y: float


class Pair(NamedTuple):
    left: int
    right: list[int]


def test_results_named_by_fields() -> None:
    def scored(x: float) -> Scores:
        return {"label": "a", "scores": np.ones(2, np.float32)}

    def point(x: float) -> Point:
        return Point(x, 1)

    def pair(x: float) -> Pair:
        return Pair(1, [2, 3])

    assert TypedFunction(scored).signature.outputs == (TensorSpec("label", BYTES, (1,)), TensorSpec("scores", FP32))
    assert list(_infer(scored, x=1.0)) == ["label", "scores"]
    assert [spec.name for spec in TypedFunction(point).signature.outputs] == ["x", "y"]
    assert _infer(point, x=2.0)["y"].data.tolist() == [1.0]
    assert _infer(pair, x=2.0)["right"].data.tolist() == [2, 3]


def test_results_without_annotation() -> None:
    def mapping(x: float) -> Mapping[str, NDArray[Any]]:
        return {"y": np.ones(1)}

    def bare(x: float):  # type: ignore[no-untyped-def]
        return "text"

    def several(x: float) -> tuple[NDArray[Any], ...]:
        return np.ones(1), np.ones(2)

    for function in (mapping, bare, several):
        assert TypedFunction(function).signature.open_outputs
    assert list(_infer(mapping, x=1.0)) == ["y"]
    assert _infer(bare, x=1.0).shape == (1,)
    assert len(_infer(several, x=1.0)) == 2


def test_results_that_do_not_match_are_rejected() -> None:
    def none(x: float) -> float:
        return None  # type: ignore[return-value]

    def overflow(x: float) -> int:
        return 2**70

    def short(x: float) -> tuple[float, float]:
        return (1.0,)  # type: ignore[return-value]

    def fieldless(x: float) -> Scores:
        return {"label": "a"}  # type: ignore[typeddict-item]

    for function, message in ((none, "output-0"), (overflow, "output-0"), (short, "2 results"), (fieldless, "scores")):
        with pytest.raises(InvalidOutput, match=message):
            _infer(function, x=1.0)


async def test_functions_coroutines_and_generators() -> None:
    async def later(x: float) -> float:
        return x

    def stream(n: int) -> Iterator[int]:
        yield from range(n)

    async def async_stream(n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    def handed(n: int) -> Iterator[int]:
        return iter(range(n))

    assert inspect.iscoroutinefunction(TypedFunction(later).infer)
    assert inspect.isgeneratorfunction(TypedFunction(stream).infer)
    assert inspect.isgeneratorfunction(TypedFunction(handed).infer)
    assert inspect.isasyncgenfunction(TypedFunction(async_stream).infer)
    assert _output(await _infer(later, x=2.0)).data.tolist() == [2.0]
    for function in (stream, handed):
        assert TypedFunction(function).signature.outputs == (TensorSpec("output-0", INT64, (1,)),)
        assert [_output(chunk).data.tolist() for chunk in _infer(function, n=2)] == [[0], [1]]
    assert [_output(chunk).data.tolist() async for chunk in _infer(async_stream, n=2)] == [[0], [1]]


class Scale:
    """A callable with a method, to be served as either."""

    def __call__(self, x: float) -> float:
        return 2 * x

    async def later(self, x: float) -> float:
        return 3 * x


def _scaled(factor: float, x: float) -> float:
    return factor * x


async def test_methods_partials_and_callable_objects() -> None:
    for function in (Scale(), partial(_scaled, 2.0)):
        typed = TypedFunction(function)
        assert [spec.name for spec in typed.signature.inputs] == ["x"]
        assert _output(_infer(function, x=1.0)).data.tolist() == [2.0]
    assert _output(await _infer(Scale().later, x=1.0)).data.tolist() == [3.0]


def test_unsupported_annotations_are_rejected_at_load() -> None:
    def unknown(x: dict[str, int]) -> float:
        return 1.0

    def nested(x: list[dict[str, int]]) -> float:
        return 1.0

    def variadic(*x: float) -> float:
        return 1.0

    def returned(x: float) -> set[int]:
        return set()

    def missing(x: "Nowhere") -> float:  # type: ignore[name-defined] # noqa: F821
        return 1.0

    def dates(x: NDArray[np.datetime64]) -> float:
        return 1.0

    for function, message in (
        (unknown, r"parameter 'x' of .*unknown: unsupported annotation dict\[str, int\]"),
        (nested, "parameter 'x'.*list of float"),
        (variadic, r"'\*x'"),
        (returned, r"the result of .*set\[int\]"),
        (missing, "Nowhere"),
        (dates, "parameter 'x'.*no datatype"),
    ):
        with pytest.raises(ModelFailed, match=message):
            TypedFunction(function)


class AnnotatedValue(NamedTuple):
    """A value that a client encodes, and the annotation of the parameter that takes it."""

    tensor: Tensor
    annotation: Any
    value: Any


def _examples() -> list[AnnotatedValue]:
    day, image = datetime(2022, 1, 11), Image.new("L", (2, 1))
    return [
        AnnotatedValue(codecs.DatetimeCodec.to_tensor(day), datetime, day),
        AnnotatedValue(Tensor.of(["2022-01-11"]), datetime | None, day),
        AnnotatedValue(codecs.DatetimeCodec.to_tensor([day, day]), list[datetime], [day, day]),
        AnnotatedValue(codecs.DatetimeCodec.to_tensor(day), str, "2022-01-11T00:00:00"),
        AnnotatedValue(codecs.Base64Codec.to_tensor(b"\xff"), bytes, b"\xff"),
        AnnotatedValue(codecs.Base64Codec.to_tensor([b"\xff"]), list[bytes], [b"\xff"]),
        AnnotatedValue(codecs.Base64Codec.to_tensor([b"\xff"]), np.ndarray, [[b"\xff"]]),
        AnnotatedValue(codecs.Base64Codec.to_tensor([b"\xff"]), Any, [b"\xff"]),
        AnnotatedValue(codecs.StringCodec.to_tensor("ü"), str, "ü"),
        AnnotatedValue(codecs.StringCodec.to_tensor("ü"), Any, ["ü"]),
        AnnotatedValue(codecs.NumpyCodec.to_tensor(np.array([1.5])), float, 1.5),
        AnnotatedValue(codecs.NumpyCodec.to_tensor(np.array([[1.5]])), np.ndarray, [[1.5]]),
        AnnotatedValue(codecs.JsonCodec.to_tensor({"a": [1]}), dict, {"a": [1]}),
        AnnotatedValue(codecs.JsonCodec.to_tensor([{"a": 1}]), list[dict[str, Any]], [{"a": 1}]),
        AnnotatedValue(codecs.StringCodec.to_tensor(["x", "y"]), pd.Series, ["x", "y"]),
        AnnotatedValue(codecs.PillowImageCodec.to_tensor(image), Image.Image, image),
        AnnotatedValue(Tensor.of(np.zeros((1, 2), np.uint8)), Image.Image, image),
    ]


@pytest.mark.parametrize("example", _examples(), ids=lambda w: str(w.annotation))
def test_annotations_take_precedence_over_content_types(example: AnnotatedValue) -> None:
    received = []

    def f(x: Any) -> float:
        received.append(x)
        return 0.0

    f.__annotations__["x"] = example.annotation
    _infer(f, x=example.tensor)
    found = received[0].tolist() if hasattr(received[0], "tolist") else received[0]
    assert found == example.value if not isinstance(found, Image.Image) else found.tobytes() == example.value.tobytes()


@pytest.mark.parametrize(("text", "kind"), [("[1]", "list"), ("null", "NoneType"), ('"a"', "str")])
def test_json_that_is_not_an_object_is_rejected(text: str, kind: str) -> None:
    def one(x: dict[str, Any]) -> float:
        return 0.0

    def many(x: list[dict[str, Any]]) -> float:
        return 0.0

    for f in (one, many):
        with pytest.raises(InvalidInput, match=f"input 'x': expected JSON objects, got {kind}"):
            _infer(f, x=Tensor.of([text]))


def test_content_types_in_settings_take_precedence_over_annotations() -> None:
    def f(x: Any, table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(x=x)

    typed = TypedFunction(f, defaults=Defaults("", {"x": "base64", "day": "datetime"}))
    response = typed.infer(Infer({"x": Tensor.of(["aGk="]), "day": Tensor.of(["2022-01-11"])}))
    assert isinstance(response, Inference)
    assert list(response.outputs) == ["day", "x"]
    back = codecs.PandasCodec.to_value(response.outputs)
    assert back.x.tolist() == [b"hi"]
    assert back.day.tolist() == [pd.Timestamp(2022, 1, 11)]


def test_two_parameters_for_all_other_inputs_are_rejected() -> None:
    def two(a: pd.DataFrame, b: pd.DataFrame) -> float:
        return 0.0

    def both(a: pd.DataFrame, **others: Any) -> float:
        return 0.0

    for function in (two, both):
        with pytest.raises(ModelFailed, match="expected one parameter for all other inputs"):
            TypedFunction(function)


def test_a_named_tuple_does_not_import_pandas() -> None:
    code = (
        "import asyncio, sys\n"
        "from typing import NamedTuple\n"
        "from dragoman.engine_setup import open_engine\n"
        "class Pair(NamedTuple):\n    a: float\n    b: float\n"
        "def pair(x: float) -> Pair:\n    return Pair(x, 2 * x)\n"
        "async def main():\n"
        "    async with open_engine(pair, placement='thread') as engine:\n"
        "        return await engine.infer('pair', {'x': [1.5]})\n"
        "found = asyncio.run(main())\n"
        "print(found['a'], found['b'], 'pandas' in sys.modules)\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "[1.5] [3.] False"
