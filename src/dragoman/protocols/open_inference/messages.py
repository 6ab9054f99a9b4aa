"""Messages of the Open Inference Protocol over REST, besides those of inference, and their description for OpenAPI."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import structs

from dragoman.core.calls import IndexEntry
from dragoman.formats.body import HEADER_LENGTH, InferRequest, InferResponse
from dragoman.protocols.open_inference.rest_request import ControlBody
from dragoman.protocols.open_inference.statistics import StatisticsList
from dragoman.protocols.wire import EVENT_STREAM, JSON, OCTET_STREAM, Bodies, ErrorMessage, Operation

_Required = msgspec.Meta(extra_json_schema={"required": ["model_name", "outputs"]})


class ServerMetadata(msgspec.Struct):
    """Name, version and protocol extensions of the server."""

    name: str
    version: str
    extensions: Sequence[str]


class ModelNames(msgspec.Struct):
    """Names of the models that the caller may use."""

    models: Sequence[str]


class TensorMetadata(msgspec.Struct, omit_defaults=True):
    """An input or output of a model; -1 is an axis of any length. The parameter `any_rank` marks any shape,
    `content_type` names the default codec; `columns` and `labels` are the names of columns and classes, as JSON."""

    name: str
    datatype: str
    shape: Sequence[int]
    parameters: Mapping[str, bool | str] = {}


class ModelMetadata(msgspec.Struct, omit_defaults=True):
    """Inputs and outputs of a model. `parameters` has the default `content_type` of requests, `details` depend on its
    runtime."""

    name: str
    platform: str
    inputs: Sequence[TensorMetadata]
    outputs: Sequence[TensorMetadata]
    versions: Sequence[str] = ()
    parameters: Mapping[str, str] = {}
    details: Mapping[str, Any] = {}


class ModelState(msgspec.Struct):
    """A version of a model in the repository. `reason` says why it is not READY."""

    name: str
    version: str
    state: str
    reason: str


class WorkerState(msgspec.Struct):
    """A worker process of a model version, or one that is awaited. `host` is "" on the server's machine.

    `mean_s` is a running estimate of the time per call in seconds, 0 while it is unknown.
    """

    host: str
    process: str
    state: Literal["idle", "busy", "hung", "unavailable", "waiting"]
    reason: str
    calls: int
    mean_s: float


class ModelStatus(ModelState):
    """The state of a model version, the number of calls that are queued or running, and its worker processes."""

    calls: int
    workers: Sequence[WorkerState]


class ServerStatus(msgspec.Struct):
    ready: bool
    may_control: bool
    models: Sequence[ModelStatus]
    problems: Sequence[str] = ()


class Liveness(msgspec.Struct):
    live: bool


class Readiness(msgspec.Struct, omit_defaults=True):
    ready: bool
    name: str = ""


class GenerateRequest(msgspec.Struct):
    """A prompt and parameters of generation: `max_tokens`, `temperature`, `top_p`, `stop` and others.

    Models that do not generate text take their input tensors by name instead, and return their outputs by name.
    """

    text_input: Annotated[str, msgspec.Meta(min_length=1)] | msgspec.UnsetType = msgspec.UNSET
    parameters: Mapping[str, Any] | None = None
    id: str | None = None


class GenerateResponse(msgspec.Struct):
    model_name: str
    text_output: str | msgspec.UnsetType = msgspec.UNSET
    model_version: str = ""
    id: str = ""


class LogSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Triton's log settings; `null` changes nothing. `log_file` cannot be changed."""

    log_info: bool | None = None
    log_warning: bool | None = None
    log_error: bool | None = None
    log_verbose_level: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None = None
    log_format: Literal["default", "ISO8601"] | None = None


_LENGTH = {HEADER_LENGTH.title(): {"type": "integer", "minimum": 0}}
_INFER: Bodies = {JSON: InferRequest, OCTET_STREAM: None}

SERVER = Operation("Describe the server", {200: {JSON: ServerMetadata}})
MODELS = Operation("List the models", {200: {JSON: ModelNames}})
MODEL = Operation("Describe a model", {200: {JSON: ModelMetadata}})
STATISTICS = Operation("Read the statistics of models", {200: {JSON: StatisticsList}})
CONFIG = Operation("Read the configuration of a model", {200: {JSON: dict[str, Any]}})
INFER = Operation(
    "Run a model",
    {200: {JSON: Annotated[InferResponse, _Required], OCTET_STREAM: None}},
    _INFER,
    headers=_LENGTH,
)
INFER_STREAM = Operation("Run a model that streams its outputs", {200: {EVENT_STREAM: None}}, _INFER, headers=_LENGTH)
GENERATE = Operation("Complete a prompt", {200: {JSON: GenerateResponse}}, {JSON: GenerateRequest})
GENERATE_STREAM = Operation("Complete a prompt as a stream", {200: {EVENT_STREAM: None}}, {JSON: GenerateRequest})
INDEX = Operation(
    "List the model repository",
    {200: {JSON: list[ModelState]}},
    {JSON: ControlBody | None},
    is_body_required=False,
)
STATUS = Operation("Show models and workers", {200: {JSON: ServerStatus}})
LOAD = Operation("Load or reload a model", {200: {}}, {JSON: ControlBody | None}, is_body_required=False)
UNLOAD = Operation("Unload a model", {200: {}}, {JSON: ControlBody | None}, is_body_required=False)


def health(summary: str, body: type, *, has_body: bool) -> Operation:
    """Describe a health check: 200 is true, 400 is false."""
    bodies: Bodies = {JSON: body} if has_body else {}
    return Operation(summary, {200: bodies, 400: {JSON: (body, ErrorMessage)} if has_body else {}})


def server_status(
    ready: bool, may_control: bool, problems: Sequence[str], entries: Sequence[IndexEntry]
) -> ServerStatus:
    """Return the message about these model versions, whether the caller may load and unload some, and problems of the
    server, which such callers see.
    """
    models = [
        ModelStatus(
            entry.name,
            entry.version,
            entry.state,
            entry.reason,
            entry.calls,
            [WorkerState(**structs.asdict(worker)) for worker in entry.workers],
        )
        for entry in entries
    ]
    return ServerStatus(ready, may_control, models, problems if may_control else ())
