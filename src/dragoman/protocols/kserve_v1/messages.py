"""Messages of KServe's V1 protocol, and the description of its routes for OpenAPI."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.protocols.wire import JSON, ModelReadiness, Operation


class Instances(msgspec.Struct):
    """Rows, each a value of the only input, or an object with a value for each input."""

    instances: Sequence[Any]
    signature_name: str | None = None
    parameters: Mapping[str, Any] | None = None


class Columns(msgspec.Struct):
    """The values of the only input, or an object with those of each input."""

    inputs: Mapping[str, Any] | Sequence[Any]
    signature_name: str | None = None
    parameters: Mapping[str, Any] | None = None


class Predictions(msgspec.Struct):
    """A value for each row, or an object with one of each output."""

    predictions: Sequence[Any]


class Status(msgspec.Struct):
    """The state of the server."""

    status: str


PREDICT = Operation(
    "Run a model", {200: {JSON: Predictions}}, {JSON: (Instances, Columns)}, path="/v1/models/{name}:predict"
)
ALIVE = Operation("Check whether all models can answer", {200: {JSON: Status}})
READY = Operation("Check whether a model can answer", {200: {JSON: ModelReadiness}})
