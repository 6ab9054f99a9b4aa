"""Every setting of the server, declared once: name, type, default, bounds, help and group.

`http_port` is the flag `--http-port`, the variable `DRAGOMAN_HTTP_PORT` and the key `http_port` in the `[server]` table
of `dragoman.toml`. A flag overrides the variable, which overrides the file. `docs/settings.md` is generated from this
module by `scripts/settings-page`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from dragoman.core.errors import InvalidInput
from dragoman.core.options import (
    RENAMED,
    SECRET_FILES,
    KafkaOptions,
    ModelOptions,
    Option,
    WorkerOptions,
    current_name,
    options,
    secrets_in_files,
    suggestion,
    values,
)

PREFIX = "DRAGOMAN_"

# Groups of settings, in the order of `--help` and the documentation.
ADDRESSES = "Addresses"
MODELS = "Models"
SECURITY = "Security and model control"
LIMITS = "Limits and timeouts"
PROTOCOLS = "Protocols"
CORS = "Browsers (CORS)"
LOGGING = "Logging"
GROUPS = (ADDRESSES, MODELS, SECURITY, LIMITS, PROTOCOLS, CORS, LOGGING)


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions:
    """Settings that parsers and formatters of requests and responses need."""

    nonfinite: Annotated[
        Literal["null", "literal", "error"],
        Option(
            "NaN and infinities in JSON responses: null (NaN as null, infinities are errors), literal (NaN, Infinity) "
            "or error",
            PROTOCOLS,
        ),
    ] = "null"
    grpc_output_contents: Annotated[
        Literal["raw", "typed", "as-request"],
        Option(
            "tensors in gRPC responses: raw (typed for typed requests with a content type), typed, or as-request",
            PROTOCOLS,
        ),
    ] = "raw"
    health_json: Annotated[bool, Option("health endpoints return a JSON body", PROTOCOLS)] = False
    web_pages: Annotated[bool, Option("serve the console at / and the pages of the API at /docs", PROTOCOLS)] = True
    metrics_path: Annotated[str, Option('path of Prometheus metrics; "" disables them', PROTOCOLS)] = "/metrics"
    metrics_as: Annotated[
        Literal["", "vllm", "tgi", "triton"],
        Option(
            "also export metrics under the names of another server: vllm or tgi (text models), or triton", PROTOCOLS
        ),
    ] = ""
    responses_as: Annotated[
        Literal["", "mlserver"],
        Option("errors, streams and handlers as in another server: mlserver, the default for its folders", PROTOCOLS),
    ] = ""
    strict_parameters: Annotated[
        bool,
        Option(
            "reject unknown parameters of text generation; else the header x-ignored-parameters names them", PROTOCOLS
        ),
    ] = False
    max_stored_responses: Annotated[
        int,
        Option("stored responses of /v1/responses, in at most 64 MiB and for an hour; 0: none", PROTOCOLS),
    ] = 1000
    load_on_demand: Annotated[
        bool, Option("load a model when a request for it arrives; pinned models at the start", MODELS)
    ] = False
    lmi_http_codes: Annotated[str, Option("HTTP statuses of LMI's errors, such as timeout=408", PROTOCOLS)] = ""
    trust_request_chat_template: Annotated[
        bool,
        Option(
            "accept a `chat_template` in chat requests; it runs in a sandbox without a limit on memory",
            SECURITY,
            operator_only=True,
        ),
    ] = False
    allow_config_override: Annotated[bool, Option("let clients override configs", SECURITY, operator_only=True)] = False
    allow_file_override: Annotated[
        Literal["no", "data", "code"],
        Option(
            "let load requests send files: data (such as ONNX), or also code (such as model.py)",
            SECURITY,
            operator_only=True,
        ),
    ] = "no"
    max_json_depth: Annotated[int, Option("nesting depth of JSON; beyond it 400", LIMITS)] = 64
    max_json_values: Annotated[
        int, Option("values in the JSON of a request, tensors excluded; beyond it 400", LIMITS)
    ] = 1 << 19
    max_json_bytes: Annotated[
        int, Option("bytes of the JSON of a request, tensors included; beyond it 413", LIMITS)
    ] = 16 << 20
    max_rank: Annotated[int, Option("dimensions of a tensor; beyond it 400", LIMITS)] = 32
    max_elements: Annotated[int, Option("elements of a tensor; beyond it 400", LIMITS)] = 1 << 31
    max_bytes_elements: Annotated[int, Option("elements of a BYTES tensor; beyond it 400", LIMITS)] = 1 << 20
    max_tensors: Annotated[int, Option("inputs or outputs of a request; beyond it 400", LIMITS)] = 1024
    max_file_bytes: Annotated[int, Option("bytes of an uploaded file; beyond it 413", LIMITS, minimum=1)] = 512 << 20
    max_sequences: Annotated[
        int, Option("completions generated for one prompt (n, best_of or beams); beyond it 400", LIMITS, minimum=1)
    ] = 16


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Settings that the HTTP and gRPC servers need."""

    root_path: Annotated[str, Option("path prefix that a proxy adds, such as /models", PROTOCOLS)] = ""
    reject_host_mismatch: Annotated[
        bool,
        Option(
            "reject HTTP/1.1 requests for an absolute URL whose host is not that of the Host header",
            SECURITY,
            serve_only=True,
        ),
    ] = False
    compress_responses: Annotated[
        bool, Option("compress responses for clients that accept gzip or deflate", PROTOCOLS)
    ] = True
    max_body_bytes: Annotated[
        int, Option("bytes of a request body or gRPC message, also after decompression; beyond it 413", LIMITS)
    ] = 64 << 20
    max_bodies_bytes: Annotated[
        int, Option("bytes of all request and response bodies in flight together; beyond it 503; 0: no limit", LIMITS)
    ] = 1 << 30
    max_loop_delay_s: Annotated[
        float,
        Option(
            "seconds that requests may wait for others in the event loop; further ones get 503 at once; 0: no limit",
            LIMITS,
        ),
    ] = 0.0
    max_header_bytes: Annotated[
        int, Option("bytes of request line and headers; beyond it 431", LIMITS, serve_only=True)
    ] = 16 << 10
    max_headers: Annotated[int, Option("headers of a request; beyond it 431", LIMITS, minimum=1, serve_only=True)] = 256
    max_connections: Annotated[
        int,
        Option(
            "open connections of HTTP and of gRPC, each; further ones get health checks only; 0: no limit",
            LIMITS,
            serve_only=True,
        ),
    ] = 20_000
    max_streams: Annotated[
        int,
        Option(
            "concurrent requests and gRPC calls of one HTTP/2 connection; further ones wait or get REFUSED_STREAM",
            LIMITS,
            minimum=1,
            serve_only=True,
        ),
    ] = 500
    max_grpc_calls: Annotated[
        int,
        Option(
            "concurrent gRPC calls on each port, health checks excluded; further ones get RESOURCE_EXHAUSTED",
            LIMITS,
            minimum=1,
            serve_only=True,
        ),
    ] = 2000
    max_grpc_calls_per_address: Annotated[
        int,
        Option(
            "gRPC calls of one client address on each port; further ones get RESOURCE_EXHAUSTED; 0: no limit",
            LIMITS,
            serve_only=True,
        ),
    ] = 1000
    grpc_stream_idle_timeout_s: Annotated[
        float,
        Option(
            "seconds without a message on a gRPC stream while no call is computed; then DEADLINE_EXCEEDED; 0: no limit",
            LIMITS,
            serve_only=True,
        ),
    ] = 600.0
    header_timeout_s: Annotated[
        float,
        Option(
            "seconds to receive the request line and headers, or for a TLS handshake; then 408", LIMITS, serve_only=True
        ),
    ] = 10.0
    body_timeout_s: Annotated[
        float, Option("seconds to receive a body, plus one for each 64 KiB; then 408", LIMITS)
    ] = 30.0
    write_timeout_s: Annotated[
        float, Option("seconds that a client may leave a response unread; then the connection is closed", LIMITS)
    ] = 60.0
    keep_alive_timeout_s: Annotated[
        float, Option("seconds that an idle connection stays open", LIMITS, serve_only=True)
    ] = 75.0
    max_connection_age_s: Annotated[
        float,
        Option(
            "seconds, give or take a tenth, after which a connection is closed once no request can be lost, so that "
            "clients reach other servers; 0: no limit",
            LIMITS,
            serve_only=True,
        ),
    ] = 0.0
    max_connection_age_grace_s: Annotated[
        float,
        Option(
            "seconds that requests in flight may take on a connection of that age before they are cancelled; 0: no "
            "limit",
            LIMITS,
            serve_only=True,
        ),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class Settings(ModelOptions, WorkerOptions, KafkaOptions, TransportOptions, ProtocolOptions):
    """Settings of a server; every default suits a first try on one machine."""

    host: Annotated[
        str,
        Option(
            "address to listen on; 0.0.0.0: every interface; '::': over IPv6 as well",
            ADDRESSES,
            common=True,
            not_empty=True,
            serve_only=True,
        ),
    ] = "127.0.0.1"
    http_port: Annotated[
        int, Option("port of HTTP; 0: any free port", ADDRESSES, maximum=65535, common=True, serve_only=True)
    ] = 8080
    grpc_port: Annotated[
        int,
        Option(
            "port of gRPC; 0: any free port, -1: gRPC is off",
            ADDRESSES,
            minimum=-1,
            maximum=65535,
            common=True,
            serve_only=True,
        ),
    ] = 8081
    http_also: Annotated[
        str, Option("further HTTP addresses, such as host:port,host:port", ADDRESSES, serve_only=True)
    ] = ""
    umbridge_port: Annotated[
        int,
        Option(
            "further HTTP port, for UM-Bridge clients that expect 4242; 0: any free port, -1: none",
            ADDRESSES,
            minimum=-1,
            maximum=65535,
            serve_only=True,
        ),
    ] = -1
    shared_memory: Annotated[
        bool, Option("let clients on this machine register shared memory for tensors", ADDRESSES, operator_only=True)
    ] = False
    umbridge_shared_memory: Annotated[
        bool,
        Option("let UM-Bridge clients on this machine pass vectors in shared memory", ADDRESSES, operator_only=True),
    ] = False
    processes: Annotated[
        int,
        Option(
            "processes that answer requests with copies of the models; 0: one per core",
            ADDRESSES,
            maximum=256,
            serve_only=True,
        ),
    ] = 1
    tls_cert: Annotated[
        str,
        Option(
            "file with the TLS certificate chain (PEM), for HTTP and gRPC", ADDRESSES, not_empty=True, serve_only=True
        ),
    ] = ""
    tls_key: Annotated[
        str, Option("file with the TLS private key (PEM)", ADDRESSES, not_empty=True, serve_only=True)
    ] = ""
    tls_client_ca: Annotated[
        str,
        Option(
            "file with the authorities (PEM) of client certificates, which are then required",
            ADDRESSES,
            not_empty=True,
            serve_only=True,
        ),
    ] = ""
    tls_client_crl: Annotated[
        str,
        Option(
            "file with the revocation lists (PEM) of these authorities; needs tls_min_version 1.3",
            ADDRESSES,
            not_empty=True,
            serve_only=True,
        ),
    ] = ""
    tls_client_optional: Annotated[
        bool,
        Option("also serve clients without a certificate; they need a key then", ADDRESSES, serve_only=True),
    ] = False
    tls_min_version: Annotated[Literal["1.2", "1.3"], Option("lowest version of TLS", ADDRESSES, serve_only=True)] = (
        "1.2"
    )
    admin_port: Annotated[
        int,
        Option(
            "port for metrics and model control, which other ports then reject; 0: any free port, -1: none",
            ADDRESSES,
            minimum=-1,
            maximum=65535,
            serve_only=True,
        ),
    ] = -1
    admin_host: Annotated[
        str,
        Option(
            "address of the admin port; default: that of the other ports", ADDRESSES, not_empty=True, serve_only=True
        ),
    ] = ""
    sagemaker: Annotated[
        bool,
        Option(
            "run as a SageMaker container: HTTP on every interface at SAGEMAKER_BIND_TO_PORT, no gRPC, PATH "
            "/opt/ml/model, or with SAGEMAKER_MULTI_MODEL=true models below /opt/ml/models, loaded on request",
            ADDRESSES,
            serve_only=True,
        ),
    ] = False

    model_name: Annotated[
        str,
        Option("name of the only model that is served; default: the name of its file or folder", MODELS, common=True),
    ] = ""
    version_policy: Annotated[str, Option("versions to serve: latest, all, or a list such as 1,3", MODELS)] = "latest"
    version_weights_file: Annotated[
        str,
        Option(
            "without `state`: -: version weights of load requests end with the server; else a JSON file for them, in "
            "this release; default: they are rejected",
            MODELS,
        ),
    ] = ""
    state: Annotated[
        str,
        Option(
            "file, or folder for it, that keeps changes by clients and stored responses over restarts; for one server "
            "alone; default: they end with the server",
            MODELS,
            operator_only=True,
            not_empty=True,
        ),
    ] = ""
    load_at_start: Annotated[
        bool, Option("load models at start; else only the repository API loads models", MODELS)
    ] = True
    max_loaded_models: Annotated[
        int,
        Option(
            "model versions loaded at the same time with load_on_demand; 0: no limit",
            MODELS,
        ),
    ] = 0
    max_loaded_bytes: Annotated[
        int, Option("bytes of the files of all models loaded at the same time with load_on_demand; 0: no limit", MODELS)
    ] = 0
    load_wait_s: Annotated[
        float,
        Option("seconds that a request waits while all loaded models are busy, with load_on_demand; then 503", MODELS),
    ] = 30.0
    unload_idle_s: Annotated[
        float, Option("seconds without requests after which a model is unloaded, with load_on_demand; 0: never", MODELS)
    ] = 0.0
    watch: Annotated[
        bool,
        Option("load, replace and unload models when their files change; needs `dragoman[watch]`", MODELS, common=True),
    ] = False
    watch_quiet_s: Annotated[
        float,
        Option("seconds without a change of a model's files before `watch` loads it", MODELS, minimum=0.05),
    ] = 1.0

    api_keys: Annotated[
        str,
        Option(
            "file with hashed API keys, as `dragoman keys` writes it; every request but health checks needs a key",
            SECURITY,
            operator_only=True,
            common=True,
            not_empty=True,
        ),
    ] = ""
    api_key: Annotated[
        str,
        Option(
            "one API key for everything, of 20 characters or more; better set as environment variable",
            SECURITY,
            operator_only=True,
            not_empty=True,
        ),
    ] = ""
    jwt_jwks: Annotated[
        str,
        Option(
            "file or URL of the public keys (JWKS) of JSON Web Tokens, accepted like API keys",
            SECURITY,
            operator_only=True,
            not_empty=True,
        ),
    ] = ""
    jwt_issuer: Annotated[
        str, Option("issuer (`iss`) that tokens must have", SECURITY, operator_only=True, not_empty=True)
    ] = ""
    jwt_audience: Annotated[
        str, Option("audience (`aud`) that tokens must have", SECURITY, operator_only=True, not_empty=True)
    ] = ""
    jwt_roles_claim: Annotated[
        str, Option("claim with the roles of a token: infer, read, admin", SECURITY, operator_only=True, not_empty=True)
    ] = "roles"
    jwt_models_claim: Annotated[
        str,
        Option(
            "claim with the only models of a token; without it all models", SECURITY, operator_only=True, not_empty=True
        ),
    ] = "models"
    jwt_limits_claim: Annotated[
        str,
        Option(
            "claim with the limits of a token, an object with the fields of a key: calls_per_s, max_concurrent, "
            "tokens_per_minute, tokens_per_day, priority",
            SECURITY,
            operator_only=True,
            not_empty=True,
        ),
    ] = "limits"
    auth_failures_per_minute: Annotated[
        int,
        Option(
            "wrong keys of a client address in a minute; further ones get 429; 0: no limit",
            SECURITY,
            operator_only=True,
        ),
    ] = 30
    allowed_hosts: Annotated[
        str,
        Option(
            "public host names, such as models.example.org,*.example.org or *, that requests without keys may be for; "
            "default: none if the server listens on this machine only, else *",
            SECURITY,
            operator_only=True,
            not_empty=True,
        ),
    ] = ""
    control_token: Annotated[
        str,
        Option("token for loading and unloading models through the API", SECURITY, operator_only=True, not_empty=True),
    ] = ""
    control_open: Annotated[
        bool,
        Option(
            "let every client load and unload models without a token; for isolated networks",
            SECURITY,
            operator_only=True,
        ),
    ] = False
    control_loopback: Annotated[
        bool,
        Option(
            "let processes on this machine load and unload models without a token, as KServe's agent does; requests "
            "that a proxy forwards are rejected",
            SECURITY,
            operator_only=True,
        ),
    ] = False
    model_folders: Annotated[
        str,
        Option("folders, such as /srv/a,/srv/b, from which POST /models may load models", SECURITY, operator_only=True),
    ] = ""
    files_folder: Annotated[
        str,
        Option(
            "folder of uploaded files and of batches; default: dragoman-files beside the file of `state`, else a "
            "temporary one",
            MODELS,
            operator_only=True,
            not_empty=True,
        ),
    ] = ""
    max_files: Annotated[int, Option("files of each key; beyond it 429", LIMITS, minimum=1)] = 1000
    max_files_bytes: Annotated[int, Option("bytes of all files of each key; beyond it 429", LIMITS, minimum=1)] = (
        10 << 30
    )
    max_batches: Annotated[int, Option("batches of each key that have not ended; beyond it 429", LIMITS, minimum=1)] = (
        100
    )
    max_batch_lines: Annotated[int, Option("lines of a batch; one with more fails", LIMITS, minimum=1)] = 100_000
    max_batch_calls: Annotated[
        int,
        Option("lines of batches that run at the same time, shared by the keys", LIMITS, minimum=1),
    ] = 16
    keep_memory: Annotated[bool, Option("keep memory of large requests for later ones", LIMITS, serve_only=True)] = True
    drain_s: Annotated[float, Option("seconds that requests in flight may take after SIGTERM", LIMITS)] = 30.0
    drain_delay_s: Annotated[
        float,
        Option(
            "seconds after SIGTERM in which the server reports not ready and still responds, for load balancers",
            LIMITS,
            serve_only=True,
        ),
    ] = 0.0

    protocols: Annotated[str, Option("protocols to serve", PROTOCOLS)] = (
        "oip_rest,oip_generate,umbridge,lmi,tgi,openai,anthropic,ollama,kserve_v1,oip_grpc,metrics,usage,batches,"
        "message_batches"
    )
    server_name: Annotated[str, Option("name of the server in its metadata", PROTOCOLS)] = "dragoman"
    default_model: Annotated[
        str,
        Option("model for requests that name none; default: the only one that supports the request", PROTOCOLS),
    ] = ""
    forward_headers: Annotated[
        str, Option("request headers that models receive, such as x-user,x-trace-*; never credentials", PROTOCOLS)
    ] = ""
    cors_origins: Annotated[
        str, Option("origins whose pages may send requests, such as https://a.org,https://b.org, or *", CORS)
    ] = ""
    cors_origin_regex: Annotated[str, Option("regular expression for further origins", CORS)] = ""
    cors_credentials: Annotated[bool, Option("allow requests with the user's credentials", CORS)] = False
    cors_methods: Annotated[str, Option("methods that pages of other origins may use, or *", CORS)] = "*"
    cors_headers: Annotated[str, Option("headers that pages of other origins may send, or *", CORS)] = "*"
    # Without the first one a page cannot take binary responses apart; clients wait as long as the second one says.
    cors_expose: Annotated[str, Option("response headers that pages of other origins may read", CORS)] = (
        "inference-header-content-length,retry-after,x-request-id,request-id,x-ignored-parameters,x-next-token"
    )
    cors_max_age_s: Annotated[int, Option("seconds that browsers may cache these permissions", CORS)] = 600

    log_format: Annotated[
        Literal["text", "json"], Option("format of log lines: text or json", LOGGING, serve_only=True)
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option("lowest level that is logged", LOGGING, common=True, serve_only=True),
    ] = "info"
    access_log: Annotated[
        str,
        Option(
            "file of the access log; -: standard output; default: none",
            LOGGING,
            operator_only=True,
        ),
    ] = ""
    access_log_format: Annotated[
        Literal["", "text", "json"],
        Option("format of the access log: text (name=value) or json; default: as log_format", LOGGING),
    ] = ""
    access_log_skip: Annotated[
        str,
        Option(
            "requests without a line in the access log: probes (health checks), scrapes (of metrics) and paths, "
            "comma-separated; '': none",
            LOGGING,
        ),
    ] = "probes,scrapes"
    audit_log: Annotated[
        str,
        Option(
            "file to which the audit log is appended, as JSON lines; -: standard output; default: in the log only",
            LOGGING,
            operator_only=True,
            not_empty=True,
        ),
    ] = ""
    audit_log_required: Annotated[
        bool,
        Option(
            "reject changes of models and of the server with 503 while the audit log cannot be written; else it is "
            "reported",
            LOGGING,
            operator_only=True,
        ),
    ] = False
    recent_requests: Annotated[
        int, Option("last requests whose times the console shows, by their ids; 0: none", LOGGING, maximum=100_000)
    ] = 0
    tracing_endpoint: Annotated[
        str,
        Option(
            "base URL of an OpenTelemetry collector, such as http://127.0.0.1:4318, for traces over OTLP; "
            "default: OTEL_EXPORTER_OTLP_ENDPOINT",
            LOGGING,
            operator_only=True,
        ),
    ] = ""
    tracing_ratio: Annotated[
        float,
        Option(
            "fraction of the requests without a traceparent that are traced; -1: as OTEL_TRACES_SAMPLER says, or all",
            LOGGING,
            minimum=-1,
            maximum=1,
        ),
    ] = -1.0
    explain_batches: Annotated[bool, Option("log for each batch why it was dispatched", LOGGING, serve_only=True)] = (
        False
    )

    @property
    def can_add_models(self) -> bool:
        """Whether clients may register models that do not exist at start."""
        return bool(self.model_folders) and self.allows_control

    @property
    def needs_keys(self) -> bool:
        """Whether every request but health checks needs a credential."""
        return bool(self.api_keys or self.api_key or self.jwt_jwks)

    @property
    def allows_control(self) -> bool:
        """Whether some clients may load and unload models."""
        return bool(self.control_token) or self.control_open or self.control_loopback or self.needs_keys

    def model_defaults(self) -> dict[str, Any]:
        """Return the defaults for every model, as fields of a `ModelSpec`. Without keys there is one owner."""
        return {**values(ModelOptions, self), "share_caches": self.share_caches or not self.needs_keys}


def _order(option: Option) -> tuple[bool, int, bool]:
    """Return the place of a setting: the most used ones first, then by group, those of the server before inherited."""
    return not option.common, GROUPS.index(option.group), option.name not in Settings.__annotations__


SETTINGS: Mapping[str, Option] = MappingProxyType(
    {option.name: option for option in sorted(options(Settings).values(), key=_order)}
)


_HOSTS = ("host", "admin_host", "worker_host")


def parse_settings(*layers: Mapping[str, Any]) -> Settings:
    """Return settings from layers of raw values, of which later ones override earlier ones.

    Raises InvalidInput that names an unknown key or an invalid value. Old names are accepted with a FutureWarning.
    """
    parsed: dict[str, Any] = {}
    for layer in layers:
        for given, raw in layer.items():
            name = current_name(given, layer)
            if name not in SETTINGS:
                raise InvalidInput(f"unknown setting '{name}'{suggestion(name, SETTINGS)}")
            value = parsed[name] = SETTINGS[name].parse(raw)
            if name in _HOSTS and value.startswith("["):  # as in URLs
                parsed[name] = value.removeprefix("[").removesuffix("]")
    return Settings(**parsed)


# Variables that Kubernetes (and Docker's links) set for a service whose name begins with `dragoman`.
_SERVICE_VARIABLE = re.compile(r"(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.+")


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in environment variables, and the secrets in files that they name.

    Raises InvalidInput for an unknown variable with our prefix, and for secrets that are given twice.
    """
    fields: dict[str, str] = secrets_in_files(environment)
    for variable, value in environment.items():
        key = variable.removeprefix(PREFIX)
        if key == variable or variable in SECRET_FILES or _SERVICE_VARIABLE.fullmatch(key):
            continue
        if key.endswith("PORT") and _SERVICE_URL.fullmatch(value):
            continue
        if key.lower() not in SETTINGS and key.lower() not in RENAMED:
            known = [f"{PREFIX}{name.upper()}" for name in SETTINGS]
            raise InvalidInput(f"unknown environment variable '{variable}'{suggestion(variable, known)}")
        fields[key.lower()] = value
    return fields
