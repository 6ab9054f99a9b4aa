"""The calls: what can be asked of a model or of the server, as a small closed family of frozen values.

A call is generic in its answer, so that a type checker refuses a reply written for another one. It knows no
status code, header, JSON or process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dragoman.core.signature import Signature
from dragoman.core.tensor import NONE, Parameters, Tensor

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


@dataclass(frozen=True, slots=True)
class Inference:
    """The answer to Infer: named tensors in the model's order, and parameters of the answer as a whole.

    `metadata` goes beside the answer to the one caller, where the wire has a place for it: headers over HTTP.
    """

    outputs: Tensors
    parameters: Parameters = NONE
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type["Inference"], tuple[Tensors, Parameters, Mapping[str, str]]]:
        return Inference, (self.outputs, self.parameters, self.metadata)


@dataclass(frozen=True, slots=True)
class Infer(ModelCall[Inference]):
    """Run the model on named tensors. `outputs` names those wanted; empty means the model's default ones.

    `raw`, in place of inputs, are the bytes of the one input that the model has; `bind` makes the tensor.
    """

    inputs: Tensors
    outputs: tuple[str, ...] = ()
    parameters: Parameters = NONE
    raw: bytes | None = None

    def __reduce__(self) -> tuple[type["Infer"], tuple[Tensors, tuple[str, ...], Parameters]]:
        return Infer, (self.inputs, self.outputs, self.parameters)


# --- asked of the server ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What metadata tells of a model: its served versions, its platform and its signature."""

    name: str
    versions: tuple[str, ...]
    platform: str
    signature: Signature


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """What metadata tells of the server."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One model version in the repository. `state` is UNKNOWN, READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str
    state: str
    reason: str


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
    """What is the model that the request names?"""


@dataclass(frozen=True, slots=True)
class ListModels(ServerCall[tuple[str, ...]]):
    """The names of the models that are served."""


@dataclass(frozen=True, slots=True)
class Index(ServerCall[tuple[IndexEntry, ...]]):
    """Every model version that the repository knows, or those that are ready."""

    token: str = field(repr=False, default="")
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Load(ServerCall[None]):
    """Load the model that the request names, or replace it by what is on disk now, without dropping a call."""

    token: str = field(repr=False, default="")


@dataclass(frozen=True, slots=True)
class Unload(ServerCall[None]):
    """Drain and drop the model that the request names."""

    token: str = field(repr=False, default="")


# --- the envelope ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request(Generic[Answer]):
    """A call on its way: to which model and version ("" is the default one), and until when.

    `id` is the caller's own identifier, "" where there is none. `deadline_s` is a reading of the monotonic
    clock in seconds; None means no limit. `metadata` is what came beside the call that the operator lets through to
    models; a call that has some is never merged with another.
    """

    call: Call[Answer]
    model: str = ""
    version: str = ""
    id: str = ""
    deadline_s: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response(Generic[Answer]):
    """An answer on its way back, with the version that gave it ("" where the model has none)."""

    answer: Answer
    model: str = ""
    version: str = ""
