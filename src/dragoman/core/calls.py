"""Calls: requests to a model or to the server, as a small closed family of frozen values.

A call is generic in its answer type. It knows no status code, header, JSON or process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from dragoman.core.callers import ANYONE, Caller
from dragoman.core.metrics import Family
from dragoman.core.sequences import SequenceOptions, SequenceStep
from dragoman.core.signature import Signature
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman.core.text import Generation, Prompt, Sampling, Tokenized
from dragoman.core.vectors import Config
from dragoman.core.worker_status import WorkerStatus
from dragoman.system.call_times import CallTimes

Answer = TypeVar("Answer")
Tensors = Mapping[str, Tensor]


class Call(Generic[Answer]):
    """A request for an `Answer`."""

    __slots__ = ()


class ModelCall(Call[Answer]):
    """A call that a model answers."""

    __slots__ = ()


class ServerCall(Call[Answer]):
    """A call that the engine answers: about its models, or to change them."""

    __slots__ = ()


# --- calls to a model ------------------------------------------------------------------------------------


class Inference(msgspec.Struct, frozen=True):
    """The answer to `Infer`: named tensors in the model's order, and parameters of the whole answer.

    `metadata` is sent to the client as HTTP headers or as gRPC trailing metadata. `is_last`: the model has said that
    none follows in its stream; otherwise that is known at the end of the stream.
    """

    outputs: Tensors
    parameters: Parameters = NONE
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    is_last: bool = False

    def __reduce__(self) -> tuple[type["Inference"], tuple[Tensors, Parameters, Mapping[str, str], bool]]:
        return Inference, (self.outputs, self.parameters, self.metadata, self.is_last)


class Infer(msgspec.Struct, ModelCall[Inference], frozen=True):
    """Run the model on named tensors. `outputs` names the requested outputs; empty means the default ones.

    `raw` holds the bytes of the model's only input, instead of `inputs`. `positional` holds the inputs in the
    model's order, instead of `inputs`. `bind` converts both to named tensors. `config` configures a simulator.
    `content_types` maps names of outputs to the codec that encodes them. `sequences` has, for a stateful model, the
    sequence of the call, or of each row of a batch.
    """

    inputs: Tensors
    outputs: tuple[str, ...] = ()
    parameters: Parameters = NONE
    raw: bytes | None = None
    positional: tuple[Tensor, ...] | None = None
    config: Config = NONE
    content_types: Mapping[str, Any] = NONE
    sequences: tuple[SequenceStep, ...] = ()

    @property
    def sequence(self) -> SequenceStep:
        """The sequence of a call to a stateful model that answers one sequence at a time."""
        (step,) = self.sequences
        return step

    def __reduce__(self) -> tuple[type["Infer"], tuple[Any, ...]]:
        plain = (self.inputs, self.outputs, self.parameters)
        rest = (self.raw, self.positional, self.config, self.content_types, self.sequences)
        if self.raw is None and self.positional is None and self.config is NONE and not any(rest[3:]):
            return Infer, plain
        return Infer, (*plain, *rest)


class SignatureFor(msgspec.Struct, ModelCall[Signature], frozen=True):
    """Return the signature under a config, for models whose sizes depend on it."""

    config: Config


class DerivativeCall(msgspec.Struct, ModelCall[Tensor], frozen=True, kw_only=True):
    """Base of derivative calls: the point of evaluation and the output.

    `inputs` are named vectors, or `positional` the vectors in the model's order. `output` and the inputs to
    differentiate by are names or positions; `bind` converts positions to names.
    """

    inputs: Tensors = msgspec.field(default_factory=dict)
    positional: tuple[Tensor, ...] | None = None
    output: str | int = 0
    config: Config = NONE


class Gradient(DerivativeCall, frozen=True, kw_only=True):
    """Jᵀ sens with J = d output / d input: the gradient of sens · output by one input."""

    input: str | int = 0
    sens: Tensor


class ApplyJacobian(DerivativeCall, frozen=True, kw_only=True):
    """J vec with J = d output / d input."""

    input: str | int = 0
    vec: Tensor


class ApplyHessian(DerivativeCall, frozen=True, kw_only=True):
    """d/d input2 (J_input1ᵀ sens) · vec: the second derivative of sens · output by two inputs, times vec."""

    input1: str | int = 0
    input2: str | int = 0
    sens: Tensor
    vec: Tensor


class Generate(msgspec.Struct, ModelCall[Generation], frozen=True, kw_only=True):
    """Continue each prompt. With `stream` there are several answers, one per chunk; otherwise one."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    stream: bool = False


class Tokenize(msgspec.Struct, ModelCall[Tokenized], frozen=True):
    """Tokenize a prompt as `Generate` would."""

    prompt: Prompt


class Embedded(msgspec.Struct, frozen=True):
    """The answer to `Embed`: an FP32 matrix [number of inputs, dimension], and the number of input tokens."""

    vectors: Tensor
    tokens: int


class Embed(msgspec.Struct, ModelCall[Embedded], frozen=True):
    """Compute one embedding for each text or list of token ids. Truncation is as for `Score`.

    prompt_name: the prompt of the model that is put before each text; None for its default, "" for none.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    truncate: int | None = None
    truncation_side: str = ""
    prompt_name: str | None = None


class Handled(msgspec.Struct, frozen=True):
    """The response of a custom handler, sent to the client as it is; with `is_chunk` one chunk of a streamed body."""

    content: bytes
    content_type: str = "application/json"
    status: int = 200
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    is_chunk: bool = False


class Handle(msgspec.Struct, ModelCall[Handled], frozen=True, kw_only=True):
    """Call a custom handler of a model. The only call in terms of HTTP, which the model's author chose.

    The engine fills in `handler`, e.g. "POST /scores/{name}", and `params`, the parameters of `path`.
    """

    method: str
    path: str
    query: str = ""
    content: bytes = b""
    content_type: str = ""
    handler: str = ""
    params: Mapping[str, str] = msgspec.field(default_factory=dict)


# --- calls to the server ---------------------------------------------------------------------------------


class ClassLabels(msgspec.Struct, frozen=True):
    """The labels of the classes of an output by index, and the name of the file that has them."""

    file: str
    names: tuple[str, ...]


class ModelDescription(msgspec.Struct, frozen=True):
    """Metadata of a model: its served versions, platform, signature, supported calls and further details.

    path: the model's file or folder, or "". protocols: settings for protocols, by their names.
    max_batch_size: largest batch in rows, 0 if calls are not merged. max_batch_wait_s: its wait for more rows.
    streams: its response to Infer is a stream. caches: repeated calls are answered from a cache.
    sequences: it is stateful. labels: class labels of outputs. handlers: its custom handlers, "POST /path".
    example: inputs of a request that it has answered when it was loaded, None if there is none. answered_no_example: it
    was tried with examples, and has answered none.
    kind: what it says that it is for, see `kind_of`. description: a line about it, "" for none.
    examples: requests that the model ships, by their names. distributions: outputs that were probabilities of classes,
    which sum to 1, when it answered its example.
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    signature: Signature
    calls: frozenset[type[Call[Any]]] = frozenset()
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)
    protocols: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    path: str = ""
    max_batch_size: int = 0
    max_batch_wait_s: float = 0.0
    replicas: int = 1
    streams: bool = False
    caches: bool = False
    labels: Mapping[str, ClassLabels] = msgspec.field(default_factory=dict)
    sequences: SequenceOptions | None = None
    handlers: tuple[str, ...] = ()
    example: Tensors | None = None
    answered_no_example: bool = False
    kind: str = ""
    description: str = ""
    examples: Mapping[str, Tensors] = msgspec.field(default_factory=dict)
    distributions: frozenset[str] = frozenset()


class BatchStatistics(msgspec.Struct, frozen=True):
    """Executions of a model with the same number of rows, and the seconds that they took together."""

    rows: int
    executions: int
    compute_s: float


class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and durations of the inference requests of one model version since it was loaded.

    `last_s` is the Unix time when the last one ended, 0 if there was none. `success_s` and `fail_s` are the sums of
    their durations, `queue_s` and `compute_s` the parts of `success_s` before the model began and while it computed.
    `inferences` counts the rows of requests whose first axis counts them, and every other request as 1. `cache_hits`
    were answered from the response cache.
    """

    name: str
    version: str
    last_s: float
    succeeded: int
    success_s: float
    failed: int
    fail_s: float
    queue_s: float
    compute_s: float
    inferences: int
    executions: int
    batches: tuple[BatchStatistics, ...]
    cache_hits: int = 0
    cache_misses: int = 0


class ServerDescription(msgspec.Struct, frozen=True):
    """Metadata of the server. problems: reasons why it works with less than its settings say."""

    name: str
    version: str
    extensions: tuple[str, ...]
    problems: tuple[str, ...] = ()


class IndexEntry(msgspec.Struct, frozen=True):
    """One model version in the repository index, in the state UNKNOWN, READY, UNAVAILABLE, LOADING or UNLOADING.

    `url`: where a registered model was loaded from, "" for the repository. `calls`: how many are queued or running.
    """

    name: str
    version: str
    state: str
    reason: str
    url: str = ""
    calls: int = 0
    workers: tuple[WorkerStatus, ...] = ()


class Live(msgspec.Struct, ServerCall[bool], frozen=True):
    """Return True if the server accepts calls."""


class Ready(msgspec.Struct, ServerCall[bool], frozen=True):
    """Whether the model, or without one every model, is ready. An unknown one is an error unless `may_be_unknown`."""

    may_be_unknown: bool = False


class DescribeServer(msgspec.Struct, ServerCall[ServerDescription], frozen=True):
    """Return the metadata of the server."""


class Describe(msgspec.Struct, ServerCall[ModelDescription], frozen=True):
    """Return the metadata of the model of the request.

    Without a model name it is the one that answers calls of type `able`, or, if no model does or the default
    model does not, of type `otherwise`. With `load` it is loaded if it was unloaded meanwhile.
    """

    able: type[ModelCall[Any]] | None = None
    otherwise: type[ModelCall[Any]] | None = None
    load: bool = False


class ReadStatistics(msgspec.Struct, ServerCall[tuple[ModelStatistics, ...]], frozen=True):
    """Return the statistics of the model of the request, or without one of all models that are ready."""


class DescribeModels(msgspec.Struct, ServerCall[tuple[ModelDescription, ...]], frozen=True):
    """Return the metadata of all loaded models. `after_start`: wait until the server has tried to load them all."""

    after_start: bool = False


class ListModels(msgspec.Struct, ServerCall[tuple[str, ...]], frozen=True):
    """Return the names of the served models."""


@dataclass(frozen=True, slots=True)
class States(ServerCall[tuple[IndexEntry, ...]]):
    """Return every served model version, without reasons if a client's `token` (None: our own) controls no models."""

    token: str | None = field(repr=False, default=None)


@dataclass(frozen=True, slots=True)
class MayControl(ServerCall[bool]):
    """Return whether a caller with this token may load and unload models, as far as the token decides that."""

    token: str = field(repr=False, default="")


@dataclass(frozen=True, slots=True)
class Index(ServerCall[tuple[IndexEntry, ...]]):
    """Return every model version of the repository, or only those that are ready."""

    token: str = field(repr=False, default="")
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Load(ServerCall[None]):
    """Load the model of the request, or reload it from disk, without failing calls in flight.

    With a `url`, register the model at that path under an unused name. `version_weights`, such as "1=90,2=10", replaces
    the shares of requests that versions get, "" removes them; only the version of the request is loaded, if there is
    one. `config` is a ModelConfig of Triton as JSON that replaces the configuration of the model, and `files` by their
    paths replace its folder, both until the next load.
    """

    token: str = field(repr=False, default="")
    url: str = ""
    version_weights: str | None = None
    config: str = ""
    files: Mapping[str, bytes] = field(repr=False, default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unload(ServerCall[None]):
    """Drain and unload the model of the request.

    `may_be_unknown`: one that is not loaded is a success, unless its dialect has another answer.
    """

    token: str = field(repr=False, default="")
    may_be_unknown: bool = False


# Replicas of a model that clients can set: each one loads the model, so more are likely a mistake.
MAX_REPLICAS = 64


@dataclass(frozen=True, slots=True)
class ScaleModel(ServerCall[None]):
    """Set the number of replicas of the model of the request, without failing calls in flight."""

    token: str = field(repr=False, default="")
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Authorize(ServerCall[None]):
    """Check the control token, for changes to the server that a protocol makes itself."""

    token: str = field(repr=False, default="")


class InFlight(msgspec.Struct, ServerCall[int], frozen=True):
    """Return how many calls are queued or running on models that answer any of these call types."""

    able: tuple[type[ModelCall[Any]], ...]


class Measure(msgspec.Struct, ServerCall[tuple[Family, ...]], frozen=True):
    """Return the metrics of the server and its models."""


# --- the envelope ----------------------------------------------------------------------------------------


class Request(msgspec.Struct, Generic[Answer], frozen=True):
    """A call with its model, version, deadline and metadata.

    Without a `model` the call goes to the default model, or to the only one that answers such calls. `version` ""
    means the default version. `id` is the client's request id, or "". `deadline_s` is a reading of the monotonic
    clock in seconds, or None for no deadline. `metadata` is what the operator lets through to models, e.g. HTTP
    headers; a call with metadata is never batched with others. `models` are the only models that the caller may use.
    `caller` owns what the request leaves behind.
    `is_trial`: the server sends the call itself, to find an example that the model answers; errors are expected.
    `times` is where the engine and the worker record when they work on the call: a request is for one call.
    """

    call: Call[Answer]
    model: str = ""
    version: str = ""
    id: str = ""
    deadline_s: float | None = None
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    models: frozenset[str] | None = None
    caller: Caller = ANYONE
    is_trial: bool = False
    times: CallTimes = msgspec.field(default_factory=CallTimes)


class Response(msgspec.Struct, Generic[Answer], frozen=True):
    """An answer with the model and version that gave it; `version` is "" if the model has none. `limits` are the
    `RateLimits` of the key, for some calls."""

    answer: Answer
    model: str = ""
    version: str = ""
    limits: Any = None


class ConcurrentCalls(msgspec.Struct, ServerCall[tuple[Response[Any], ...]], frozen=True):
    """Several model calls that run concurrently. The first error cancels the others."""

    requests: tuple[Request[Any], ...]
