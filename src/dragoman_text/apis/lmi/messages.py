"""Description of the routes of LMI's API for OpenAPI."""

import msgspec

from dragoman.core.calls import MAX_REPLICAS
from dragoman.protocols.wire import EVENT_STREAM, JSON, OCTET_STREAM, Operation

REFERENCE = "https://docs.djl.ai/master/docs/serving/serving/docs/lmi/user_guides/lmi_input_output_schema.html"

# Models of a page of the list, and in all.
MAX_LISTED, MAX_MODELS = 100, 1 << 31


class Registration(msgspec.Struct):
    """The name of a model, the path of its files, or both."""

    model_name: str | None = None
    url: str | None = None


_WORKERS = {"type": "integer", "minimum": 0, "maximum": MAX_REPLICAS}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}
_NEXT = {"type": "integer", "minimum": 0, "maximum": MAX_MODELS}

INVOKE = Operation(
    "Run a model on the body that it takes: a prompt with parameters, a chat, arrays or a table",
    {200: {JSON: None, EVENT_STREAM: None, OCTET_STREAM: None, "application/jsonlines": None}},
    {JSON: None, OCTET_STREAM: None, "text/csv": None},
)
PING = Operation("Check the health of all models", {200: {JSON: None}})
MODELS = Operation("List the models", {200: {JSON: None}}, query={"limit": _LIMIT, "next_page_token": _NEXT})
MODEL = Operation("Describe the versions of a model", {200: {JSON: None}})
ADAPTERS = Operation("List the adapters of a model", {200: {JSON: None}})
ADAPTER = Operation("Describe an adapter", {200: {JSON: None}})
_SOURCE = {"src": {"type": "string"}, "pin": {"type": "boolean"}, "preload": {"type": "boolean"}}
ADD_ADAPTER = Operation("Load an adapter", {200: {JSON: None}}, query={"name": {"type": "string"}, **_SOURCE})
UPDATE_ADAPTER = Operation("Load an adapter again", {200: {JSON: None}}, query=_SOURCE)
REMOVE_ADAPTER = Operation("Unload an adapter", {200: {JSON: None}})
REGISTER = Operation(
    "Register a model",
    {200: {JSON: None}},
    {JSON: Registration},
    is_body_required=False,
    query={"model_name": {"type": "string"}, "url": {"type": "string"}},
)
SCALE = Operation(
    "Set the number of workers of a model", {200: {JSON: None}}, query={"min_worker": _WORKERS, "max_worker": _WORKERS}
)
UNREGISTER = Operation("Unregister a model", {200: {JSON: None}})
