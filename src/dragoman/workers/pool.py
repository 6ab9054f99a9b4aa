"""The interface of worker pools."""

import errno
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from dragoman.core.calls import Call, Request, Tensors
from dragoman.core.chunks import ChunkStream
from dragoman.core.errors import ModelFailed, OutOfMemory
from dragoman.core.metrics import Family
from dragoman.core.sequences import SequenceOptions
from dragoman.core.signature import Signature
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.worker_status import WorkerStatus

A = TypeVar("A")

# Chunks of a stream that a model may be ahead of its reader.
WINDOW = 16
# Seconds that a stream may block its model while its reader reads nothing.
STALL_S = 30.0
# Concurrent calls of one replica of an `async` model.
CONCURRENT = 64

# Messages of C++, PyTorch, ONNX Runtime, TensorFlow and JAX, which share no exception class for lack of memory.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|bad.?alloc|RESOURCE_EXHAUSTED|(can't|cannot|could not|unable to|failed to) allocate memory",
    re.IGNORECASE,
)


class Loaded(msgspec.Struct, frozen=True):
    """Description of a loaded model.

    calls: the types of call that it supports.
    streams: its response to Infer is a stream of chunks.
    concurrent: one replica computes many calls concurrently, because its methods are `async`.
    merges: the default of `max_batch_size`.
    details: further metadata.
    handlers: URL paths that the model serves.
    sequences: it is stateful.
    example: inputs of a request that it answers, if it knows one.
    labels: names of the classes of its outputs, by index.
    kind: what it says that it is for. description: a line about it.
    """

    signature: Signature
    platform: str
    calls: frozenset[type[Call[Any]]]
    streams: bool = False
    concurrent: bool = False
    merges: int = 0
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)
    handlers: tuple[str, ...] = ()
    sequences: SequenceOptions | None = None
    example: Tensors | None = None
    labels: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    kind: str = ""
    description: str = ""


class WrongPlacement(Exception):
    """A model without a configured placement prefers another one; raised before it is loaded."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self.placement = placement


# Bytes of a model's files for which its load has one more second.
_BYTES_PER_S = 20_000_000


def load_limit_s(spec: ModelSpec) -> float | None:
    """Return the seconds in which a model must be loaded, None without a limit."""
    size = sum(size for _, _, size, _ in spec.files)
    return spec.load_timeout_s + size / _BYTES_PER_S if spec.load_timeout_s else None


def load_timeout_message(spec: ModelSpec) -> str:
    return f"it took more than {load_limit_s(spec):g} s (load_timeout_s, and a second for each 20 MB of its files)"


def load_error(name: str, reason: str, cause: BaseException | None = None) -> ModelFailed:
    """Return the error of a model that cannot be loaded: OutOfMemory if `cause` or one of its causes is that."""
    error_type = OutOfMemory if any(map(_is_out_of_memory, _with_causes(cause))) else ModelFailed
    return error_type(f"failed to load '{name}', {reason}")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | OutOfMemory):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return _OUT_OF_MEMORY.search(str(error)) is not None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class Pool(Protocol):
    """A model in one or more replicas. All methods run on the event loop.

    A pool is created with the spec of its model and a function that it calls whenever `ready` changes.
    on_capacity: called when `capacity` has grown.
    """

    on_capacity: Callable[[], None]

    def __init__(self, spec: ModelSpec, on_change: Callable[[], None]) -> None: ...

    @property
    def ready(self) -> bool:
        """Whether at least one replica can take a call now."""

    @property
    def unavailable(self) -> str:
        """Why no replica can answer, as reported by the model; "" while one can."""

    @property
    def waiting(self) -> str:
        """Which workers it waits for, also in `start`; "" if it waits for none."""

    @property
    def capacity(self) -> int:
        """Number of calls that run concurrently; further ones are queued."""

    @property
    def is_replicated(self) -> bool:
        """Whether it has as many replicas as the spec says; otherwise it has one."""

    async def start(self) -> Loaded:
        """Load every replica. Raises ModelFailed, what the model's own checks raise, NotReady where it may load
        later, or WrongPlacement."""

    def measurements(self) -> Sequence[Family]:
        """Return the metrics of the replicas; those of other processes are up to a second old."""

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return its worker processes, first those that run; none if the model runs in this process."""

    def states(self) -> Mapping[str, int]:
        """Return the number of its workers in each state: `busy`, `idle`, and for processes those of `WorkerStatus`."""

    def process_ids(self) -> Mapping[int, int]:
        """Return the processes of this machine in which its replicas run, other than this one, by replica."""

    def call(self, request: Request[A]) -> A | Coroutine[Any, Any, A]:
        """Return the response, or a coroutine that computes it if something has to wait.

        Raises NotSupported if the model yields none or several chunks. Cancelling removes the call from the queue, or
        cancels it in the worker if it runs.
        """

    def stream(self, request: Request[A]) -> ChunkStream[A]:
        """Return the chunks of the response, an error of one chunk among them. Raises nothing before it is read."""

    async def close(self) -> None:
        """Stop at once: calls that still run or wait fail with NotReady."""
