"""Every setting of the server: one dataclass, one line of help each; flag = environment variable = file key.

`http_port` is `--http-port`, `DRAGOMAN_HTTP_PORT` and `http_port` in the `[server]` table of `dragoman.toml`. A flag
goes before the environment, which goes before the file.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dragoman.core.errors import InvalidInput
from dragoman.core.spec import Placement, WorkingDirectory


def _setting(
    default: Any, line: str, group: str, *, operator_only: bool = False, least: float = 0, most: float = math.inf
) -> Any:
    """A field with its line of help and, for a number, its bounds.

    One that is the operator's alone is not read from a file beside models.
    """
    told = {"help": line, "group": group, "operator_only": operator_only, "least": least, "most": most}
    return field(default=default, metadata=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator may set; every field has a default that suits a first try on one machine."""

    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 for every network", "addresses")
    http_port: int = _setting(8080, "port of HTTP and all its protocols; 0 picks a free one", "addresses", most=65535)
    grpc_port: int = _setting(
        8081, "port of gRPC; 0 picks a free one, -1 switches gRPC off", "addresses", least=-1, most=65535
    )
    sagemaker: bool = _setting(
        False,
        "SageMaker's contract: HTTP on every network at SAGEMAKER_BIND_TO_PORT, no gRPC, PATH /opt/ml/model, or with "
        "SAGEMAKER_MULTI_MODEL models from below /opt/ml/models as they are asked for",
        "addresses",
    )
    http_also: str = _setting("", "further HTTP addresses, as host:port,host:port", "addresses")
    front_ends: int = _setting(
        1,
        "processes that accept connections, read requests and write answers, around one engine; 0: one a core",
        "addresses",
        most=256,
    )
    umbridge_port: int = _setting(
        -1,
        "further port of HTTP, for clients that look for UM-Bridge at 4242; 0 picks a free one, -1: none",
        "addresses",
        least=-1,
        most=65535,
    )
    umbridge_shared_memory: bool = _setting(
        False, "let clients of UM-Bridge on this machine pass vectors in shared memory", "addresses", operator_only=True
    )
    tls_cert: str = _setting("", "file of the TLS certificate chain (PEM), for HTTP and gRPC", "addresses")
    tls_key: str = _setting("", "file of the TLS private key (PEM)", "addresses")

    allow_pickle: bool = _setting(
        False, "load model files that can run code when loaded (pickle, joblib)", "models", operator_only=True
    )
    placement: Placement = _setting("", "where models run: inline, thread or process; else the model decides", "models")
    replicas: int = _setting(1, "copies of each model that answer at the same time", "models", least=1)
    max_batch_size: int = _setting(0, "merge waiting calls up to this many rows; 0 merges nothing", "models")
    max_batch_wait_s: float = _setting(0.0, "seconds that a batch may wait for more rows", "models")
    batch_linger: float = _setting(
        0.5, "share of the model's time that a batch waits for callers just answered to ask again", "models", most=10
    )
    max_queue: int = _setting(1024, "calls of a model that may wait or run; more get 503; 0: no limit", "models")
    timeout_s: float = _setting(0.0, "deadline in seconds of calls that bring none; 0: none", "models")
    cancel_grace_s: float = _setting(
        10.0, "seconds that a process may go on with a call nobody waits for before it is killed; 0: no limit", "models"
    )
    heartbeat_s: float = _setting(
        5.0,
        "seconds that an idle or stopped worker process may be silent before its model is not ready; 0: for ever",
        "models",
    )
    working_directory: WorkingDirectory = _setting(
        "shared",
        "working directory of worker processes: shared is that of the server, own is a new empty one for each replica",
        "models",
    )
    version_policy: str = _setting("latest", "which versions to serve: latest, all, or a list as 1,3", "models")
    load_at_start: bool = _setting(True, "load models at the start; else only the repository API loads any", "models")

    control_token: str = _setting(
        "", "token that enables loading and unloading models over the API", "security", operator_only=True
    )
    control_open: bool = _setting(
        False,
        "without a token, let whoever reaches the server load and unload models; for networks closed to others",
        "security",
        operator_only=True,
    )
    model_folders: str = _setting(
        "",
        "folders, as /srv/a,/srv/b, below which POST /models may load what a `url` names; none by default",
        "security",
        operator_only=True,
    )
    trust_request_chat_template: bool = _setting(
        False,
        "let chats bring a `chat_template`; it runs in a sandbox, for as long and with as much memory as it takes",
        "security",
        operator_only=True,
    )
    max_body_bytes: int = _setting(64 << 20, "largest request body, before and after decompression", "limits")
    max_bodies_bytes: int = _setting(1 << 30, "bytes of all bodies under way together; 0: no limit", "limits")
    max_header_bytes: int = _setting(16 << 10, "largest head of a request", "limits")
    max_headers: int = _setting(256, "header fields of a request", "limits", least=1)
    max_connections: int = _setting(
        20_000,
        "connections at a time, over HTTP and over gRPC; beyond them only health checks are answered; 0: no limit",
        "limits",
    )
    max_streams: int = _setting(
        500, "requests and gRPC calls at a time of one HTTP/2 connection; clients wait with more", "limits", least=1
    )
    max_grpc_calls: int = _setting(
        2000,
        "gRPC calls at a time on each port; more get RESOURCE_EXHAUSTED; health checks do not count",
        "limits",
        least=1,
    )
    max_grpc_calls_per_address: int = _setting(
        1000,
        "gRPC calls at a time from one client address on each port; 0: no limit",
        "limits",
    )
    grpc_stream_idle_timeout_s: float = _setting(
        600.0,
        "seconds that a gRPC stream may be open without a request on it; 0: no limit",
        "limits",
    )
    header_timeout_s: float = _setting(10.0, "seconds that a request's head may take to arrive", "limits")
    body_timeout_s: float = _setting(30.0, "seconds that a body may take, and one more for each 64 KiB", "limits")
    write_timeout_s: float = _setting(60.0, "seconds that a client may leave its answer unread", "limits")
    keep_alive_timeout_s: float = _setting(75.0, "seconds that an idle connection stays open", "limits")
    max_json_depth: int = _setting(64, "how deep JSON may nest", "limits")
    max_json_values: int = _setting(
        1 << 19,
        "values (texts, numbers, lists, objects) in the JSON of a request, outside of data of tensors",
        "limits",
    )
    max_json_bytes: int = _setting(16 << 20, "bytes of the JSON of a request, outside of data of tensors", "limits")
    max_rank: int = _setting(32, "how many axes a tensor may have", "limits")
    max_elements: int = _setting(1 << 31, "how many elements a tensor may have", "limits")
    max_bytes_elements: int = _setting(1 << 20, "how many elements a tensor of BYTES may have", "limits")
    max_tensors: int = _setting(1024, "how many inputs or outputs a request may have", "limits")
    max_sequences: int = _setting(
        16, "how many texts may be generated at a time for one prompt, as n, best_of or beams", "limits", least=1
    )
    drain_s: float = _setting(30.0, "seconds that calls under way may take after SIGTERM", "limits")
    drain_delay_s: float = _setting(
        0.0,
        "seconds after SIGTERM in which the server is not ready and still answers, so that load balancers can notice",
        "limits",
    )

    nonfinite: Literal["null", "literal", "error"] = _setting(
        "null", "NaN and infinities in JSON: null (infinities refused), literal (NaN, Infinity) or error", "wire"
    )
    forward_headers: str = _setting(
        "", "headers of requests that models see, as x-user,x-trace-*; credentials never", "wire"
    )
    health_json: bool = _setting(False, "health endpoints answer a JSON body instead of an empty one", "wire")
    strict_parameters: bool = _setting(
        False, "refuse unknown parameters of text generation; else the header x-ignored-parameters names them", "wire"
    )
    lmi_http_codes: str = _setting(
        "", "statuses of LMI's errors that differ from its own, as throttle_error=429,timeout=408", "wire"
    )
    compress_responses: bool = _setting(True, "compress answers for clients that accept gzip or deflate", "wire")
    root_path: str = _setting("", "path that a proxy puts before every other, as /models", "wire")
    cors_origins: str = _setting(
        "", "sites whose pages may ask, as https://a.org,https://b.org, or *; none by default", "browsers"
    )
    cors_origin_regex: str = _setting("", "further sites, by a regular expression of the whole origin", "browsers")
    cors_credentials: bool = _setting(False, "whether browsers may send the credentials of their user", "browsers")
    cors_methods: str = _setting("GET,POST", "methods that pages of other sites may use, or *", "browsers")
    cors_headers: str = _setting("*", "headers that pages of other sites may send, or *", "browsers")
    cors_expose: str = _setting("", "headers of answers that pages of other sites may read", "browsers")
    cors_max_age_s: int = _setting(600, "seconds that a browser may remember what it may ask", "browsers")
    server_name: str = _setting("dragoman", "the server's name in its metadata", "wire")
    default_model: str = _setting(
        "",
        "the model that answers calls which name none; where it cannot, and without it, the only one that can",
        "wire",
    )
    metrics_path: str = _setting(
        "/metrics", 'path where measurements are told in Prometheus\' format; "" switches them off', "wire"
    )
    metrics_as: Literal["", "tgi"] = _setting(
        "", "tell what text models measure under another server's names too: tgi, for its dashboards", "wire"
    )
    protocols: str = _setting(
        "oip_rest,oip_generate,umbridge,lmi,tgi,openai,oip_grpc,metrics", "protocols to speak, by name", "wire"
    )

    keep_memory: bool = _setting(True, "keep memory that large requests have used, for the next ones", "limits")

    log_format: Literal["text", "json"] = _setting("text", "format of the log: text or json", "log")
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least level of what is logged", "log")

    @property
    def may_grow(self) -> bool:
        """Whether models that are not there at the start may come while it runs."""
        return bool(self.model_folders) and (bool(self.control_token) or self.control_open)

    def model_defaults(self) -> dict[str, Any]:
        """What holds for every model that does not say otherwise, as fields of a `ModelSpec`."""
        return {name: getattr(self, name) for name in _OF_MODELS}


_OF_MODELS = (
    "allow_pickle",
    "placement",
    "replicas",
    "max_batch_size",
    "max_batch_wait_s",
    "batch_linger",
    "max_queue",
    "timeout_s",
    "cancel_grace_s",
    "heartbeat_s",
    "working_directory",
)
FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
PREFIX = "DRAGOMAN_"
_HINTS = typing.get_type_hints(Settings)


def choices(name: str) -> tuple[str, ...]:
    """The words that a setting is limited to; none where it is not."""
    hint = _HINTS[name]
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def kind(name: str) -> type:
    hint: Any = _HINTS[name]
    return str if typing.get_origin(hint) in (Literal, types.UnionType) else hint


def merged(*layers: Mapping[str, Any]) -> Settings:
    """Settings from layers of raw values, a later one before an earlier; InvalidInput names a bad key or value."""
    values: dict[str, Any] = {}
    for layer in layers:
        for name, raw in layer.items():
            if name not in FIELDS:
                raise InvalidInput(f"there is no setting '{name}'; there are {', '.join(FIELDS)}")
            values[name] = parsed(name, raw)
    return Settings(**values)


def parsed(name: str, raw: Any) -> Any:
    """A setting's value from text or from a file; InvalidInput says what was expected."""
    wanted = kind(name)
    if choices(name):
        if raw not in choices(name):
            raise InvalidInput(
                f"setting '{name}': expected one of {', '.join(filter(None, choices(name)))}, got {raw!r}"
            )
        return raw
    if wanted is bool:
        return _boolean(name, raw)
    if isinstance(raw, bool) or (wanted is int and isinstance(raw, float)):
        raise InvalidInput(f"setting '{name}': expected {wanted.__name__}, got {raw!r}")
    try:
        value = wanted(raw)
    except (TypeError, ValueError) as fault:
        raise InvalidInput(f"setting '{name}': expected {wanted.__name__}, got {raw!r}") from fault
    return value if wanted is str else _bounded(name, value)


def _bounded(name: str, value: float) -> float:
    least, most = FIELDS[name].metadata["least"], FIELDS[name].metadata["most"]
    if not least <= value <= most:  # NaN is not either
        bounds = f"at least {least}" if math.isinf(most) else f"{least} to {most}"
        raise InvalidInput(f"setting '{name}': expected {bounds}, got {value}")
    return value


def _boolean(name: str, raw: Any) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    found = raw if isinstance(raw, bool) else words.get(str(raw).lower())
    if found is None:
        raise InvalidInput(f"setting '{name}': expected true or false, got {raw!r}")
    return found


def sagemaker_paths(environment: Mapping[str, str]) -> list[str]:
    """Where SageMaker puts the model of a container; those of an endpoint of many come one by one, later."""
    return [] if _has_many(environment) else ["/opt/ml/model"]


def sagemaker_defaults(environment: Mapping[str, str]) -> dict[str, Any]:
    """What SageMaker expects of a container, where nobody says otherwise."""
    port = environment.get("SAGEMAKER_BIND_TO_PORT") or "8080"
    made = {"host": "0.0.0.0", "http_port": port, "grpc_port": -1}  # noqa: S104 - a container's own network
    # It sends no token. Requests from outside reach the paths of inference alone.
    return {**made, "model_folders": "/opt/ml/models", "control_open": _has_many(environment)}


def _has_many(environment: Mapping[str, str]) -> bool:
    """Whether the container is one of a multi-model endpoint."""
    return environment.get("SAGEMAKER_MULTI_MODEL", "").lower() == "true"


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings among environment variables. Others with our prefix are somebody else's, Kubernetes' for one."""
    given = {key[len(PREFIX) :].lower(): value for key, value in environment.items() if key.startswith(PREFIX)}
    return {name: value for name, value in given.items() if name in FIELDS}
