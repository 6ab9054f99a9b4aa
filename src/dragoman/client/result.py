"""What a model answered, as a caller wants it: arrays, decoded values or a data frame."""

from collections.abc import Iterator, Mapping
from typing import Any

from dragoman.codecs.registry import CODECS
from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor
from dragoman.formats.message import InferenceResponse


class Result(Mapping[str, Any]):
    """The outputs of one answer by name, in the model's order.

    `result["y"]` is what the output's content type says (text, points in time, ...), else its array. Without
    decoding it is always the array. Arrays are read-only views of what came: copy one to write into it. BF16
    is an array of `ml_dtypes.bfloat16`, BYTES an object array of `bytes`.
    """

    def __init__(self, response: InferenceResponse, decode: bool = True) -> None:
        self.response = response
        self._decode = decode
        self._tensors = response.tensors
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._value(name, self._tensors[name])
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        told = [f"{name}: {t.datatype}{list(t.shape)}" for name, t in self._tensors.items()]
        return f"<Result of {self.response.model_name}: {', '.join(told)}>"

    @property
    def value(self) -> Any:
        """The answer as one value: what its own content type says (a DataFrame for `pd`), else its one output.

        An answer of several outputs without a content type is a dict.
        """
        kind = self.response.parameters.get("content_type")
        codec = CODECS.request(str(kind)) if kind and self._decode else None
        if codec is not None:
            return codec.decode_response(self.response)
        return next(iter(self.values())) if len(self) == 1 else dict(self)

    def to_numpy(self, name: str = "") -> Array:
        """The array of an output, whatever its content type; without a name of the only one.

        Raises InvalidInput where there are several, KeyError where there is none of that name.
        """
        if not name and len(self) != 1:
            raise InvalidInput(f"name the output to have as an array: one of {', '.join(map(repr, self))}")
        return self._tensors[name or next(iter(self))].data

    def to_frame(self) -> Any:
        """The outputs as the columns of a pandas DataFrame. Raises InvalidInput where they are none."""
        codec = CODECS.request("pd")
        assert codec is not None
        return codec.decode_response(self.response)

    def _value(self, name: str, tensor: Tensor) -> Any:
        content_type = tensor.parameters.get("content_type")
        if not content_type or not self._decode:
            return tensor.data
        where = f"output '{name}'"
        return CODECS.input(str(content_type), where).to_value(tensor, where)
