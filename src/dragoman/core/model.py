"""The class that a model author writes: override what the model can do."""

from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from typing import Any

from dragoman.core.calls import (
    ApplyHessian,
    ApplyJacobian,
    Embed,
    Generate,
    Gradient,
    Handle,
    Infer,
    Inference,
    SignatureFor,
    Tokenize,
)
from dragoman.core.datatypes import Array
from dragoman.core.metrics import Family
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.tensor import Tensor

# What `infer` may give: one array for a model of one output, a tuple in the order of the outputs, or names.
Result = Inference | Mapping[str, Tensor | Array] | tuple[Tensor | Array, ...] | Tensor | Array
Results = Result | Awaitable[Result] | Iterator[Result] | AsyncIterator[Result]


class Model:
    """A model. A subclass overrides what it can do; that alone declares its abilities.

    Class attributes tell what need not be computed:

    - `inputs`, `outputs`: its tensors; without them any named input is taken and any output given.
    - `batched`: the first axis of every tensor counts independent rows, so that calls may be merged.
    - `merges`: to how many rows its calls are merged while it is busy, where the operator says nothing of it.
    - `platform`: what metadata says of the framework.
    - `placement`: where it runs unless the operator says otherwise. "process" keeps a model that holds
      Python's lock, or may crash, away from the server; "thread" suits native code that releases the lock;
      "inline", on the event loop, suits only what takes less than about 0.1 ms, and `async` methods.

    - `handlers`: paths of its own that `handle` answers, as "POST /scores/{name}".
    - `takes_request`: its methods get the whole `Request`, with the caller's id and metadata, not the call alone.

    `spec` is what the operator says of it: its `uri`, `parameters` and so on.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batched: bool = False
    merges: int = 0
    platform: str = "python"
    placement: Placement = "process"
    handlers: tuple[str, ...] = ()
    takes_request: bool = False

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def load(self) -> Any:
        """Get ready to answer: read files, build sessions. Runs once, before the first call; may be `async`."""

    def signature(self) -> Signature:
        """What the model takes and gives; asked once, after `load`."""
        return Signature(
            inputs=self.inputs,
            outputs=self.outputs,
            open_inputs=not self.inputs,
            open_outputs=not self.outputs,
            batched=self.batched,
        )

    def signature_for(self, call: SignatureFor) -> Any:
        """What the model takes and gives under `call.config`, where its sizes depend on that."""
        raise NotImplementedError

    def details(self) -> Mapping[str, Any]:
        """What else metadata should tell of it: plain JSON values by name; asked once, after `load`."""
        return {}

    def measurements(self) -> Iterable[Family]:
        """What `/metrics` tells of it beside its calls, where it lives in the server's process; its name and version
        are added as labels. Asked in the server's thread, at any time, and must not take long."""
        return ()

    def unavailable(self) -> str:
        """Why the model cannot answer now, as when a server that it calls is down; "" while it can. The model's
        readiness follows it. Asked about once a second, in any thread, also during calls; must return at once."""
        return ""

    def infer(self, call: Infer) -> Results:
        """Answer one call: `call.inputs` are named tensors, checked against the signature.

        May be a plain function, `async`, a generator or an async generator; a generator's pieces are a stream
        of answers. `call.outputs` names the outputs that are wanted (empty: the default ones); giving more is
        allowed. An error of `dragoman.errors` reaches the caller as it is, any other as a failure of the model.
        """
        raise NotImplementedError

    def gradient(self, call: Gradient) -> Any:
        """Jᵀ `call.sens`, a vector as long as the input `call.input`; names and lengths of the call are checked."""
        raise NotImplementedError

    def apply_jacobian(self, call: ApplyJacobian) -> Any:
        """J `call.vec`, a vector as long as the output `call.output`."""
        raise NotImplementedError

    def apply_hessian(self, call: ApplyHessian) -> Any:
        """d/d input2 (J_input1ᵀ `call.sens`) · `call.vec`, a vector as long as the input `call.input1`."""
        raise NotImplementedError

    def generate(self, call: Generate) -> Any:
        """Pieces of text (`Generation`): several where `call.stream` is set, else one that is the whole."""
        raise NotImplementedError

    def tokenize(self, call: Tokenize) -> Any:
        """The prompt's tokens (`Tokenized`)."""
        raise NotImplementedError

    def embed(self, call: Embed) -> Any:
        """One vector for each text (`Embedded`)."""
        raise NotImplementedError

    def handle(self, call: Handle) -> Any:
        """Answer (`Handled`) at one of the paths in `handlers`; `call.handler` says which."""
        raise NotImplementedError

    def close(self) -> Any:
        """Let go of what `load` took; may be `async`."""
