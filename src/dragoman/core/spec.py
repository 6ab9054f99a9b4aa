"""The configuration of one model version: where it is, what runs it and how, and the models beside it."""

import re
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

from dragoman.core import error_texts
from dragoman.core.calls import ModelDescription, Request, Response
from dragoman.core.chunks import ChunkStream
from dragoman.core.dialect import Dialect
from dragoman.core.errors import InvalidInput
from dragoman.core.options import ModelOptions, Option
from dragoman.core.options import Placement as Placement
from dragoman.core.schedule import ScheduleOptions
from dragoman.core.sequences import SequenceOptions
from dragoman.core.signature import TensorSpec

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

# Path, inode, size in bytes and time of modification (ns) of a file.
FileState = tuple[str, int, int, int]


class FileContent(NamedTuple):
    """A file that a model is loaded from. digest: its SHA-256 hash."""

    path: str
    size: int
    digest: str
    is_executable: bool = False


class ResponseStream(Protocol[A_co]):
    """Responses of a call as they come; `next` blocks. `close` cancels the call, in any thread."""

    def __iter__(self) -> Iterator[A_co]: ...

    def __next__(self) -> A_co: ...

    def close(self) -> None: ...


class SiblingModels(Protocol):
    """The other models of the server, for a model in the server's process.

    `begin` and `responses` are for models on the event loop. All others but `unavailable` and `streams` block: use them
    in threads of the model, never on the event loop.
    """

    @property
    def is_used(self) -> bool:
        """Whether the model has used others, also while it was loaded."""

    def describe(self, name: str) -> ModelDescription:
        """Return the metadata of a model, once it is loaded.

        Raises ModelNotFound, NotReady if it could not be loaded, and InvalidInput if it waits for the model that
        asks.
        """

    def unavailable(self, name: str, version: str = "") -> str:
        """Return why a model is not ready, or "". Returns at once, in any thread."""

    def streams(self, name: str) -> bool:
        """Return whether a model has several responses to a call. Returns at once, in any thread."""

    def call(self, request: Request[A]) -> A:
        """Return the answer of the model of the request. It is queued, limited and counted like any other call."""

    def begin(self, request: Request[A]) -> Response[A] | Coroutine[Any, Any, Response[A]]:
        """As `call`, on the event loop: return the response, or a coroutine that waits for it."""

    def stream(self, request: Request[A]) -> ResponseStream[A]:
        """Start a call; return its responses."""

    def responses(self, request: Request[A]) -> ChunkStream[A]:
        """As `stream`, on the event loop."""

    def load(self, name: str, config: str = "", files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Load a model of the repository, or load it again. Raises the errors of loading.

        config, files: as in the call `Load`.
        """

    def unload(self, name: str) -> None:
        """Unload a model, which ends the calls in flight before. Raises ModelNotFound."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Where the worker processes of a model come from: the table `[model.placement]`.

    launcher: `local`, `join`, `command` or another plug-in.
    command: the command line that starts a worker.
    script: file with the first lines of each job, such as `#SBATCH` lines.
    resources: what a scheduler gives each worker.
    keep: whether jobs of a launcher outlive a regular stop of the server, and not only its death.
    drain_s: how long before its time limit a worker gets no further calls.
    files: `shared` if workers find the model's files under the same paths, `send` if the server sends them.
    replicas, min_replicas: the most and the fewest workers; equal unless their number follows the load (elastic).
    min_ready: number of workers with which the model is ready; 0 if calls may wait for the first one.
    wait_s: how long calls wait when the last worker is lost; then they fail, as new ones do, until there is one again.
    devices: GPUs of this machine, one for each worker of launcher `local`.
    """

    launcher: Annotated[
        str,
        Option("local (child processes), join (workers that you start), command, slurm, hyperqueue or ray"),
    ] = "local"
    command: Annotated[
        str, Option("command line that starts a worker, such as ssh node1 dragoman worker --join {address}")
    ] = ""
    script: Annotated[
        str, Option("file with the first lines of the job script of launcher slurm: #SBATCH lines, module load")
    ] = ""
    resources: Annotated[
        Mapping[str, Any], Option("what the scheduler gives each worker, such as cpus, gpus, time or partition")
    ] = field(default_factory=dict)
    keep: Annotated[bool, Option("jobs stay when the server stops, for the next one to adopt; needs --state")] = False
    drain_s: Annotated[float, Option("seconds before its time limit at which a worker gets no further calls")] = 60.0
    files: Annotated[
        Literal["shared", "send"],
        Option("shared: hosts of workers have the model's files under the same paths; send: the server sends them"),
    ] = "shared"
    replicas: Annotated[
        int, Option('number of workers, or a range such as "0..16" that follows the load', minimum=1)
    ] = 1
    min_ready: Annotated[
        int, Option("number of workers that must have joined before the model is ready", minimum=0)
    ] = 1
    wait_s: Annotated[
        float,
        Option(
            "seconds that calls wait once no worker is left; then they get 503, as new calls do, until one has joined; "
            "with min_ready 0 they wait until their deadline",
            minimum=0,
        ),
    ] = 60.0
    idle_s: Annotated[
        float, Option("seconds without a call after which a worker above the minimum number is stopped")
    ] = 300.0
    cost: Annotated[
        float, Option("seconds of waiting that a further worker must save to be started; 0: start it for any wait")
    ] = 0.0
    devices: Annotated[
        tuple[str, ...], Option("GPUs, one for each worker of launcher local, in its CUDA_VISIBLE_DEVICES")
    ] = ()
    min_replicas: int | None = None

    @property
    def sends_files(self) -> bool:
        """Whether the server sends the model's files to its workers."""
        return self.files == "send"

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers follows the load."""
        return self.min_replicas is not None and self.min_replicas < self.replicas


# Among the details of a loaded model of Triton: its configuration, if the model has completed it.
COMPLETED_CONFIG = "triton_config"
# Among the details of a loaded model of MLServer: `platform` and `versions` of its metadata, as in its settings.
STATED_METADATA = "stated_metadata"

# Model names and versions: safe in a URL and as the name of a folder.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelOptions):
    """One version of one model, before it is loaded.

    name, version: as clients name it; version "" if the model has none.
    runtime: the plug-in that loads it (`sklearn`, `onnx`, `python`, ...).
    uri: its file or folder, or `module:attribute` / `file.py:attribute` for Python.
    url: the path it was registered from at run time; "" for models of the repository.
    target: a live Python object instead of a uri; worker processes import it by name.
    siblings: access to the other models, for a model in the server's process; set by the server.
    files: the files that it is made of, as they were when it was found on disk; set by the repository.
    contents: the files that it is loaded from, for workers on other machines to compare; set by the server.
    warmup: path of a file of requests that the model answers before it is ready; "" for none.
    pinned: it stays loaded where other models are loaded on demand.
    description: a line about the model for people.
    platform, inputs, outputs: override what the model declares.
    labels: path of a file of class labels, one a line, of each output that has some.
    parameters: further settings for the runtime.
    protocols: settings for protocols, by their names, e.g. how LMI formats responses.
    placement: `inline` (on the event loop), `thread`, `process`; "" leaves it to the runtime.
    sequences: how it serves sequences, instead of what the model declares.
    schedule: priorities and limits of its queue.
    dialect: habits of the server that it was written for, from the files beside it; None for those of its runtime.
    launch: where worker processes come from, if not from this machine. worker_port: the port that workers on other
    machines join; set by the server.
    replicas: number of copies that run concurrently.
    max_batch_size: largest batch in rows; 0: the model's own default; 1: no batching.
    max_batch_wait_s: how long a batch may wait for more rows, in seconds, besides waiting for an idle worker.
    batch_linger: how long a batch waits for clients that resend at once, as a fraction of the model's latency; 0
    disables it.
    max_queue: number of calls that may be queued or running before others are rejected; 0 for no limit.
    response_cache_bytes: memory for the answers to earlier requests, which equal requests get; 0 for none.
    share_caches: the owners of requests share one response cache and one prefix cache.
    timeout_s: default deadline of calls in seconds; 0 for none.
    trial_s: seconds in which it is tried with example requests when it is loaded; 0 for no trial.
    cancel_grace_s: seconds after which a worker process is killed that still runs a cancelled call; 0 for never.
    heartbeat_s: seconds without heartbeat after which a worker process counts as hung; 0 for never.
    max_crashes, crash_window_s: a worker process that crashes this often within these seconds is not restarted.
    working_directory: `shared` with the server, or `own`, an empty directory per worker process.
    script_arguments: command-line arguments of the script of a KServe model.
    idempotent: whether calls of lost workers are computed again on others.
    allow_pickle: allow files that can run code when they are loaded.
    model_digests: the list of digests that its files must have, "" for none; digests: these, once they are checked.
    """

    name: Annotated[str, Option("name that clients use; default: the name of the file or folder")]
    version: Annotated[str, Option("version that clients use; default: none, or the name of the version's folder")] = ""
    runtime: Annotated[str, Option("plug-in that loads the model: sklearn, onnx, python, ...; default: by file")] = ""
    uri: Annotated[str, Option("file or folder, or module:object or file.py:object")] = ""
    url: str = ""
    target: Any = None
    siblings: SiblingModels | None = field(default=None, compare=False, repr=False)
    files: tuple[FileState, ...] = field(default=(), repr=False)
    contents: tuple[FileContent, ...] = field(default=(), compare=False, repr=False)
    digests: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    launch: LaunchOptions | None = None
    sequences: SequenceOptions | None = None
    schedule: ScheduleOptions | None = None
    dialect: Dialect | None = None
    worker_port: Any = field(default=None, compare=False, repr=False)
    platform: Annotated[str, Option("platform in the metadata; default: the runtime's")] = ""
    description: Annotated[
        str, Option("a line about the model, for people; default: its docstring, metadata or README.md")
    ] = ""
    inputs: Annotated[
        tuple[TensorSpec, ...], Option("inputs, each with name, datatype and shape; default: the model's own")
    ] = ()
    outputs: Annotated[
        tuple[TensorSpec, ...], Option("outputs, each with name, datatype and shape; default: the model's own")
    ] = ()
    warmup: Annotated[
        str, Option("file, relative to this one, of Open Inference requests that the model answers before it is ready")
    ] = ""
    labels: Annotated[
        Mapping[str, str], Option("file of class labels of each output, one a line, relative to this file")
    ] = field(default_factory=dict)
    pinned: Annotated[bool, Option("load the model at the start and never unload it, with load_on_demand")] = False
    parameters: Annotated[Mapping[str, Any], Option("parameters of the runtime")] = field(default_factory=dict)
    protocols: Annotated[Mapping[str, Mapping[str, Any]], Option("a table of parameters for each protocol")] = field(
        default_factory=dict
    )


def check_name(name: str, what: str = "model name") -> str:
    """Return `name` if it is a valid name of a model or version. Raises InvalidInput."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{what} {name!r} is not allowed; expected 1 to 256 letters, digits, '_', '-' and '.', not beginning "
            "with '.' or '-'"
        )
    return name


def check_load_name(name: str) -> str:
    """As `check_name`, for the name of a model to load: the errors have the texts of Triton."""
    if not name.strip():
        raise InvalidInput(error_texts.EMPTY_NAME)
    if "/" in name or name.strip() == "..":
        raise InvalidInput(error_texts.path_in_name(name))
    return check_name(name, f"{error_texts.not_in_repository(name)}: model name")
