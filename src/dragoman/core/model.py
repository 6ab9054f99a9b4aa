"""The class that a model author writes: override what the model can do."""

from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dragoman.core import calls
from dragoman.core.datatypes import Array
from dragoman.core.metrics import Family
from dragoman.core.scoring import Score
from dragoman.core.sequences import SequenceOptions
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.tensor import Tensor
from dragoman.core.text_engine_calls import LoadAdapter, ResetPrefixCache, UnloadAdapter

# What `infer` may give: one array for a model of one output, a tuple in the order of the outputs, or names.
Result = calls.Inference | Mapping[str, Tensor | Array] | tuple[Tensor | Array, ...] | Tensor | Array
Results = Result | Awaitable[Result] | Iterator[Result] | AsyncIterator[Result]


class Model:
    """A model. Subclasses override the methods for the calls that they support.

    Class attributes:

    - `inputs`, `outputs`: the tensors of the model; if empty, any named input is accepted and any output returned.
    - `batched`: the first axis of every tensor counts independent rows, so that calls may be merged into batches.
    - `merges`: rows of a batch if the model is `batched` and the operator sets no `max_batch_size`; 0: no batching.
    - `platform`: the framework, for metadata.
    - `kind`: what the model is for, such as "classifier"; a member of `dragoman.core.kinds.KINDS`. "": by its tensors.
    - `description`: a line about it, for people. A class or function in Python has that of its docstring.
    - `placement`: where the model runs unless the operator says otherwise. "process" protects the server from models
      that hold the GIL or may crash. "thread" suits native code that releases the GIL. "inline", on the event loop,
      suits `async` methods and models that take less than about 0.1 ms. By default the runtime decides; for Python
      models that is "process", and "thread" for objects that are passed to `dragoman.serve`.
    - `handlers`: paths that `handle` answers, e.g. "POST /scores/{name}".
    - `takes_request`: methods get the whole `Request`, with request id and metadata, instead of the call.
    - `sequences`: the model is stateful. Requests need a `sequence_id`; those of one sequence come one after the other
      to the same replica, and share `call.sequence.state`, a dictionary. With `batched` a call has rows of several
      sequences, `call.sequences[i]` is that of row i.

    `spec` is the configuration of the model: its `uri`, `parameters` and so on.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batched: bool = False
    merges: int = 64
    platform: str = "python_function"
    kind: str = ""
    description: str = ""
    placement: Placement = ""
    handlers: tuple[str, ...] = ()
    takes_request: bool = False
    sequences: SequenceOptions | None = None

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def load(self) -> Any:
        """Prepare the model: read files, create sessions. Called once, before the first call; may be `async`."""

    def signature(self) -> Signature:
        """Return inputs and outputs. Called once, after `load`."""
        return Signature(
            inputs=self.inputs,
            outputs=self.outputs,
            open_inputs=not self.inputs,
            open_outputs=not self.outputs,
            batched=self.batched,
        )

    def signature_for(self, call: calls.SignatureFor) -> Any:
        """Return inputs and outputs under `call.config`, for models whose sizes depend on it."""
        raise NotImplementedError

    def details(self) -> Mapping[str, Any]:
        """Return further metadata as JSON values by name. Called once, after `load`."""
        return {}

    def example_inputs(self) -> Mapping[str, Any] | None:
        """Return the inputs of a request that the model answers, as arrays by name. Called once, after `load`.

        The model is tried with it, and users see it. By default an example is made from the declared inputs.
        """
        return None

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        """Return class names by output, for outputs whose last axis has a value for each class. Called after `load`."""
        return {}

    def measurements(self) -> Iterable[Family]:
        """Return metrics of the model for `/metrics`, if it runs in the server's process.

        Labels with model name and version are added. Called in the server's thread at any time; must return quickly.
        """
        return ()

    def unavailable(self) -> str:
        """Return why the model cannot answer now, e.g. because a server that it calls is down; "" if it can.

        The model's readiness follows it. Called about once a second, in any thread, also during calls; must
        return at once.

        Raises WorkerLost if it can never answer again, as after the loss of an engine: a worker process is then
        ended and started again. Raise WorkerLost from the calls that fail for this reason, too.
        """
        return ""

    def infer(self, call: calls.Infer) -> Results:
        """Answer one call. `call.inputs` are named tensors, checked against the signature.

        May be a function, a coroutine function, a generator or an async generator; generators stream their
        answers. `call.outputs` names the requested outputs (empty: the default ones); more may be returned.
        Errors of `dragoman.errors` are sent to the client unchanged, any other exception as a failure of the
        model.
        """
        raise NotImplementedError

    def gradient(self, call: calls.Gradient) -> Any:
        """Return Jᵀ `call.sens`, as long as the input `call.input`. Names and lengths of the call are checked."""
        raise NotImplementedError

    def apply_jacobian(self, call: calls.ApplyJacobian) -> Any:
        """Return J `call.vec`, as long as the output `call.output`."""
        raise NotImplementedError

    def apply_hessian(self, call: calls.ApplyHessian) -> Any:
        """Return d/d input2 (J_input1ᵀ `call.sens`) · `call.vec`, as long as the input `call.input1`."""
        raise NotImplementedError

    def generate(self, call: calls.Generate) -> Any:
        """Return `Generation` chunks: several if `call.stream` is set, otherwise one."""
        raise NotImplementedError

    def tokenize(self, call: calls.Tokenize) -> Any:
        """Return the tokens of the prompt as `Tokenized`."""
        raise NotImplementedError

    def load_adapter(self, call: LoadAdapter) -> Any:
        """Load a LoRA adapter."""
        raise NotImplementedError

    def unload_adapter(self, call: UnloadAdapter) -> Any:
        """Unload a LoRA adapter."""
        raise NotImplementedError

    def reset_prefix_cache(self, call: ResetPrefixCache) -> Any:
        """Forget the computed prefixes of prompts."""
        raise NotImplementedError

    def embed(self, call: calls.Embed) -> Any:
        """Return one vector per text as `Embedded`."""
        raise NotImplementedError

    def score(self, call: Score) -> Any:
        """Return one score per pair of texts as `Scored`."""
        raise NotImplementedError

    def handle(self, call: calls.Handle) -> Any:
        """Return the response (`Handled`) of one of the `handlers`; `call.handler` says which."""
        raise NotImplementedError

    def close(self) -> Any:
        """Free what `load` acquired; may be `async`."""
