"""Messages of LMI's API, and the description of its routes for OpenAPI."""

from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.core.calls import MAX_REPLICAS
from dragoman.protocols.wire import EVENT_STREAM, JSON, OCTET_STREAM, ErrorResponses, Operation

# Models of a page of the list, and in all.
MAX_LISTED, MAX_MODELS = 100, 1 << 31


class ModelEntry(msgspec.Struct):
    """A model version, and why it is in its state."""

    modelName: str  # noqa: N815 - as on the wire
    modelUrl: str  # noqa: N815
    status: str
    version: str = ""
    reason: str = ""


class ModelPage(msgspec.Struct):
    """A page of models; the next one begins at `nextPageToken`."""

    models: Sequence[ModelEntry]
    nextPageToken: str = ""  # noqa: N815


class Adapter(msgspec.Struct):
    name: str


class AdapterList(msgspec.Struct):
    adapters: Sequence[Adapter]


class Registration(msgspec.Struct):
    """The name of a model, the path of its files, or both."""

    model_name: str | None = None
    url: str | None = None


class Done(msgspec.Struct):
    status: str


class LmiErrorMessage(msgspec.Struct):
    code: int
    type: str
    message: str


class ModelError(msgspec.Struct):
    """An error of the model."""

    error: str
    code: int


def errors(statuses: Sequence[int]) -> ErrorResponses:
    """Return the description of errors with these statuses."""
    return ErrorResponses(frozenset(statuses), {JSON: (LmiErrorMessage, ModelError, dict[str, Any])})


_WORKERS = {"type": "integer", "minimum": 0, "maximum": MAX_REPLICAS}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}
_NEXT = {"type": "integer", "minimum": 0, "maximum": MAX_MODELS}

INVOKE = Operation(
    "Run a model on the body that it takes: a prompt with parameters, a chat, arrays or a table",
    {200: {JSON: None, EVENT_STREAM: None, OCTET_STREAM: None, "application/jsonlines": None}},
    {JSON: None, OCTET_STREAM: None, "text/csv": None},
)
PING = Operation("Check the health of all models", {200: {JSON: dict[str, Any]}})
MODELS = Operation("List the models", {200: {JSON: ModelPage}}, query={"limit": _LIMIT, "next_page_token": _NEXT})
MODEL = Operation("Describe the versions of a model", {200: {JSON: list[ModelEntry]}})
ADAPTERS = Operation("List the adapters of a model", {200: {JSON: AdapterList}})
ADAPTER = Operation("Describe an adapter", {200: {JSON: list[Adapter]}})
_SOURCE = {"src": {"type": "string"}, "pin": {"type": "boolean"}, "preload": {"type": "boolean"}}
ADD_ADAPTER = Operation("Load an adapter", {200: {JSON: Done}}, query={"name": {"type": "string"}, **_SOURCE})
UPDATE_ADAPTER = Operation("Load an adapter again", {200: {JSON: Done}}, query=_SOURCE)
REMOVE_ADAPTER = Operation("Unload an adapter", {200: {JSON: Done}})
REGISTER = Operation(
    "Register a model",
    {200: {JSON: Done}},
    {JSON: Registration},
    is_body_required=False,
    query={"model_name": {"type": "string"}, "url": {"type": "string"}},
)
SCALE = Operation(
    "Set the number of workers of a model", {200: {JSON: Done}}, query={"min_worker": _WORKERS, "max_worker": _WORKERS}
)
UNREGISTER = Operation("Unregister a model", {200: {JSON: Done}})
