"""Result of a call: arrays, decoded values or a DataFrame."""

from collections.abc import Iterator, Mapping
from typing import Any

from dragoman.codecs.registry import CODECS
from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor
from dragoman.formats.message import InferenceResponse


class Result(Mapping[str, Any]):
    """Outputs of one response by name, in the order of the model.

    `result["y"]` is the value decoded by the output's content type (strings, datetimes, ...), or an array without one
    or with decode=False. Arrays are read-only views of the response: copy them before writing. BF16 is an array of
    `ml_dtypes.bfloat16`, BYTES an object array of `bytes`.
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
        outputs = [f"{name}: {t.datatype}{list(t.shape)}" for name, t in self._tensors.items()]
        return f"<Result of {self.response.model_name}: {', '.join(outputs)}>"

    @property
    def value(self) -> Any:
        """The response as one value: decoded by its content type (a DataFrame for `pd`), else its only output.

        A response with several outputs and no content type is a dict.
        """
        kind = self.response.parameters.get("content_type")
        codec = CODECS.request(str(kind)) if kind and self._decode else None
        if codec is not None:
            return codec.decode_response(self.response)
        return next(iter(self.values())) if len(self) == 1 else dict(self)

    def to_numpy(self, name: str = "") -> Array:
        """Return the array of an output without decoding; the name may be left out if there is one output.

        Raises InvalidInput if there are several outputs and no name, KeyError for an unknown name.
        """
        if not name and len(self) != 1:
            raise InvalidInput(f"expected the name of an output, one of {', '.join(map(repr, self))}")
        return self._tensors[name or next(iter(self))].data

    def to_frame(self) -> Any:
        """Return the outputs as columns of a pandas DataFrame. Raises InvalidInput if they cannot be columns."""
        codec = CODECS.request("pd")
        assert codec is not None
        return codec.decode_response(self.response)

    def _value(self, name: str, tensor: Tensor) -> Any:
        content_type = tensor.parameters.get("content_type")
        if not content_type or not self._decode:
            return tensor.data
        where = f"output '{name}'"
        return CODECS.input(str(content_type), where).to_value(tensor, where)
