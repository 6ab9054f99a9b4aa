"""The calls: what can be asked of a model or of the server, as a small closed family of frozen values.

A call is generic in its answer, so that a type checker refuses a reply written for another one. It knows no
status code, header, JSON or process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from dragoman.core.metrics import Family
from dragoman.core.signature import Signature
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman.core.text import Generation, Prompt, Sampling, Tokenized
from dragoman.core.vectors import Config

Answer = TypeVar("Answer")
Tensors = Mapping[str, Tensor]


class Call(Generic[Answer]):
    """Something that can be asked; `Answer` is what comes back."""

    __slots__ = ()


class ModelCall(Call[Answer]):
    """A call that a model itself answers."""

    __slots__ = ()


class ServerCall(Call[Answer]):
    """A call that the engine answers about its models, or does to them."""

    __slots__ = ()


# --- asked of a model ------------------------------------------------------------------------------------


class Inference(msgspec.Struct, frozen=True):
    """The answer to Infer: named tensors in the model's order, and parameters of the answer as a whole.

    `metadata` goes beside the answer to the one caller, where the wire has a place for it: headers over HTTP, trailing
    metadata over gRPC.
    """

    outputs: Tensors
    parameters: Parameters = NONE
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __reduce__(self) -> tuple[type["Inference"], tuple[Tensors, Parameters, Mapping[str, str]]]:
        return Inference, (self.outputs, self.parameters, self.metadata)


class Infer(msgspec.Struct, ModelCall[Inference], frozen=True):
    """Run the model on named tensors. `outputs` names those wanted; empty means the model's default ones.

    `raw`, in place of inputs, are the bytes of the one input that the model has; `positional`, likewise, are the
    inputs in the model's order. `bind` makes named tensors of either. `config` is what a simulator is configured by.
    `content_types` says, by the name of an output, which codec shall write it; the others are as the model gives them.
    """

    inputs: Tensors
    outputs: tuple[str, ...] = ()
    parameters: Parameters = NONE
    raw: bytes | None = None
    positional: tuple[Tensor, ...] | None = None
    config: Config = NONE
    content_types: Mapping[str, Any] = NONE

    def __reduce__(self) -> tuple[type["Infer"], tuple[Any, ...]]:
        plain = (self.inputs, self.outputs, self.parameters)
        if self.raw is None and self.positional is None and self.config is NONE and not self.content_types:
            return Infer, plain
        return Infer, (*plain, self.raw, self.positional, self.config, self.content_types)


class SignatureFor(msgspec.Struct, ModelCall[Signature], frozen=True):
    """What does the model take and give under this config? Only of models whose sizes depend on it."""

    config: Config


class DerivativeCall(msgspec.Struct, ModelCall[Tensor], frozen=True, kw_only=True):
    """What the calls of derivatives share: where, and of which output.

    `inputs` are named vectors, or `positional` those in the model's order; `output` and the inputs with respect to
    which are names, or positions, of which `bind` makes names.
    """

    inputs: Tensors = msgspec.field(default_factory=dict)
    positional: tuple[Tensor, ...] | None = None
    output: str | int = 0
    config: Config = NONE


class Gradient(DerivativeCall, frozen=True, kw_only=True):
    """Jᵀ sens with J = d output / d input: the gradient, by that input, of sens · output."""

    input: str | int = 0
    sens: Tensor


class ApplyJacobian(DerivativeCall, frozen=True, kw_only=True):
    """J vec with J = d output / d input."""

    input: str | int = 0
    vec: Tensor


class ApplyHessian(DerivativeCall, frozen=True, kw_only=True):
    """d/d input2 (J_input1ᵀ sens) · vec: the second derivative of sens · output by two inputs, applied to vec."""

    input1: str | int = 0
    input2: str | int = 0
    sens: Tensor
    vec: Tensor


class Generate(msgspec.Struct, ModelCall[Generation], frozen=True, kw_only=True):
    """Continue each prompt. With `stream` the answers are pieces as they come, else one that is the whole."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    stream: bool = False


class Tokenize(msgspec.Struct, ModelCall[Tokenized], frozen=True):
    """Cut a prompt into tokens, as generating would."""

    prompt: Prompt


class Embedded(msgspec.Struct, frozen=True):
    """The answer to Embed: a matrix [number of inputs, dimension] of FP32, and the tokens that were read."""

    vectors: Tensor
    tokens: int


class Embed(msgspec.Struct, ModelCall[Embedded], frozen=True):
    """One vector for each text, or list of token ids."""

    inputs: tuple[str | tuple[int, ...], ...]


class Handled(msgspec.Struct, frozen=True):
    """What a model's own handler gives back, for the wire as it is."""

    content: bytes
    content_type: str = "application/json"
    status: int = 200
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)


class Handle(msgspec.Struct, ModelCall[Handled], frozen=True, kw_only=True):
    """Answer at a path of the model's own. The one call that speaks the wire's language: the model's author does.

    `path` and `query` are as they came; `handler`, e.g. "POST /scores/{name}", and `params`, the parts of the path by
    name, are filled in when the engine has found whose path it is.
    """

    method: str
    path: str
    query: str = ""
    content: bytes = b""
    content_type: str = ""
    handler: str = ""
    params: Mapping[str, str] = msgspec.field(default_factory=dict)


# --- asked of the server ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What metadata tells of a model: its served versions, its platform, its signature, what it can answer (types of
    call), and further details of its kind (where derivatives come from, how long a context is). `protocols` are what
    the operator says of it to protocols, by their names, and `place` is its file or folder, "" where it has none."""

    name: str
    versions: tuple[str, ...]
    platform: str
    signature: Signature
    calls: frozenset[type[Call[Any]]] = frozenset()
    details: Mapping[str, Any] = field(default_factory=dict)
    protocols: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    place: str = ""


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """What metadata tells of the server."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One model version in the repository. `state` is UNKNOWN, READY, UNAVAILABLE, LOADING or UNLOADING; `url` is
    where it lies, as whoever registered it said, "" of what the server's own repository holds."""

    name: str
    version: str
    state: str
    reason: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Live(ServerCall[bool]):
    """Can the server receive calls?"""


@dataclass(frozen=True, slots=True)
class Ready(ServerCall[bool]):
    """Is the model that the request names, or without a name every model, ready to answer?"""


@dataclass(frozen=True, slots=True)
class DescribeServer(ServerCall[ServerDescription]):
    """What is this server?"""


@dataclass(frozen=True, slots=True)
class Describe(ServerCall[ModelDescription]):
    """What is the model that the request names, or, without a name, the one that answers calls of type `able`, or
    where no model does, or the default model does not, of type `otherwise`?"""

    able: type[ModelCall[Any]] | None = None
    otherwise: type[ModelCall[Any]] | None = None


@dataclass(frozen=True, slots=True)
class DescribeModels(ServerCall[tuple[ModelDescription, ...]]):
    """What are the models that are loaded? `after_start`: wait for the answer until the server has tried them all."""

    after_start: bool = False


@dataclass(frozen=True, slots=True)
class ListModels(ServerCall[tuple[str, ...]]):
    """The names of the models that are served."""


@dataclass(frozen=True, slots=True)
class States(ServerCall[tuple[IndexEntry, ...]]):
    """Every model version that is served, and its state."""


@dataclass(frozen=True, slots=True)
class Index(ServerCall[tuple[IndexEntry, ...]]):
    """Every model version that the repository knows, or those that are ready."""

    token: str = field(repr=False, default="")
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Load(ServerCall[None]):
    """Load the model that the request names, or replace it by what is on disk now, without dropping a call. With a
    `url`, register what lies there by that name, which no other model may have then."""

    token: str = field(repr=False, default="")
    url: str = ""


@dataclass(frozen=True, slots=True)
class Unload(ServerCall[None]):
    """Drain and drop the model that the request names."""

    token: str = field(repr=False, default="")


@dataclass(frozen=True, slots=True)
class Scale(ServerCall[None]):
    """Have so many replicas of the model that the request names, without dropping a call."""

    token: str = field(repr=False, default="")
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class InFlight(ServerCall[int]):
    """How many calls wait or are computed now, of models that answer any of these types of call?"""

    able: tuple[type[ModelCall[Any]], ...]


@dataclass(frozen=True, slots=True)
class Measure(ServerCall[tuple[Family, ...]]):
    """What have the server and its models measured?"""


# --- the envelope ----------------------------------------------------------------------------------------


class Request(msgspec.Struct, Generic[Answer], frozen=True):
    """A call on its way: to which model and version ("" is the default one), and until when.

    Without a model a call goes to the one that the operator made the default, or to the only one that can answer it.

    `id` is the caller's own identifier, "" where there is none. `deadline_s` is a reading of the monotonic
    clock in seconds; None means no limit. `metadata` is what came beside the call that the operator lets through to
    models; a call that has some is never merged with another.
    """

    call: Call[Answer]
    model: str = ""
    version: str = ""
    id: str = ""
    deadline_s: float | None = None
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)


class Response(msgspec.Struct, Generic[Answer], frozen=True):
    """An answer on its way back, with the version that gave it ("" where the model has none)."""

    answer: Answer
    model: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Together(ServerCall[tuple[Response[Any], ...]]):
    """Several calls of models, answered side by side; a fault of one is that of all, and ends them."""

    requests: tuple[Request[Any], ...]
