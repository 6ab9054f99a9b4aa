"""Support of every field of settings.json and model-settings.json, for the server, `dragoman doctor` and the docs."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dragoman.core.documents import parse_json
from dragoman.core.remarks import UNKNOWN_FIELD, Field, Remark, field_remarks

_PASSED = Field("same", "passed to the model's code")

_METRICS = "metrics are exported on the HTTP port; listen on further addresses with --http-also"
_METRIC_NAMES = "the metrics of the server have other names: see the page on metrics"
_KAFKA = "files beside models cannot connect the server to a broker: start it with --kafka-servers HOST:PORT"
_ENVIRONMENT = (
    "models have no Python environment of their own: install the packages in Dragoman's environment, or run a second "
    "server in that environment"
)
_POOL = "each model has its own worker processes; there are no shared pools"
_LOGGING = "configure the log with --log-format and --log-level"
CACHE_BYTES = 16 << 20  # for the responses of a model with `cache_enabled`; in MLServer requests are counted
_CACHE = f"each model version has a cache of its own, of {CACHE_BYTES >> 20} MiB instead of cache_size requests"
_TENSORS = "returned as metadata and used to select codecs; enforced by Dragoman's runtimes only"

SERVER: Mapping[str, Field] = {
    "host": Field("different", "the default is 127.0.0.1 instead of 0.0.0.0", "host"),
    "http_port": Field("same", "", "http_port"),
    "grpc_port": Field("same", "", "grpc_port"),
    "server_name": Field("same", "", "server_name"),
    "gzip_enabled": Field("same", "", "compress_responses"),
    "grpc_max_message_length": Field("different", "the limit applies to HTTP bodies too", "max_body_bytes"),
    "parallel_workers": Field(
        "different",
        "the number of worker processes of each model; 0 runs models in the server process",
        "replicas",
    ),
    "use_structured_logging": Field("same", "", "log_format"),
    "debug": Field(
        "unused", "errors are logged with traceback, which is never sent to clients; see --log-level", "", True
    ),
    "parallel_workers_timeout": Field(
        "unused", "worker processes that exit are restarted; see --drain-s for shutdown", "", 5
    ),
    "server_version": Field("unused", "metadata contains the version of Dragoman"),
    "extensions": Field("unused", "metadata lists the supported extensions", "", []),
    "environments_dir": Field("unused", _ENVIRONMENT),
    "metrics_endpoint": Field("same", "", "metrics_path"),
    "metrics_port": Field("different", _METRICS),
    "metrics_rest_server_prefix": Field("different", _METRIC_NAMES),
    "metrics_dir": Field("unused", "the server creates a folder for them"),
    "logging_settings": Field("unused", _LOGGING),
    "root_path": Field("same", "", "root_path"),
    "cors_settings": Field("same", "", "cors_origins"),
    "tracing_server": Field("missing", "traces are exported with --tracing-endpoint http://HOST:4318"),
    "cache_enabled": Field("different", _CACHE),
    "cache_size": Field("unused", _CACHE, "", 100),
    "load_models_at_startup": Field("same", "", "load_at_start"),
    "model_repository_root": Field("rejected", "serve that folder instead: dragoman serve FOLDER", "", "."),
    "model_repository_implementation": Field("rejected", "only folders are supported: copy the models to one"),
    "model_repository_implementation_args": Field("unused", "used only with model_repository_implementation", "", {}),
    "kafka_enabled": Field("missing", _KAFKA, "", False),
    "kafka_servers": Field("missing", _KAFKA, "", "localhost:9092"),
    "kafka_topic_input": Field("same", "", "kafka_topic_input"),
    "kafka_topic_output": Field("same", "", "kafka_topic_output"),
}

MODEL: Mapping[str, Field] = {
    **dict.fromkeys(("name", "implementation", "platform", "max_batch_time", "parameters"), Field("same")),
    **dict.fromkeys(("inputs", "outputs"), Field("different", _TENSORS)),
    "max_batch_size": Field(
        "different",
        "only requests of equal shapes and parameters are merged; a request with more rows is a 400",
    ),
    "versions": Field("same", "stated in the metadata; the served version is parameters.version"),
    "parallel_workers": Field(
        "different", "the number of this model's worker processes; 0 runs it in the server process"
    ),
    "warm_workers": Field("unused", "worker processes are always warm", "", False),
    "cache_enabled": Field("different", f"with cache_enabled of settings.json; {_CACHE}"),
}

PARAMETERS: Mapping[str, Field] = {
    **dict.fromkeys(("uri", "version", "content_type", "extra"), Field("same")),
    "format": Field("unused", "the format is recognized from the file"),
    "inference_pool_gid": Field("unused", _POOL),
    "autogenerate_inference_pool_gid": Field("unused", _POOL, "", False),
    **dict.fromkeys(("environment_path", "environment_tarball"), Field("rejected", _ENVIRONMENT)),
}


def remarks_on(
    given: Mapping[str, Any], table: Mapping[str, Field], location: str | Path, prefix: str = ""
) -> Iterator[Remark]:
    """Return the support of each field, except unsupported ones that have their default value."""
    return field_remarks(given, table, location, prefix, unknown=_PASSED if table is PARAMETERS else UNKNOWN_FIELD)


def is_true(value: Any) -> bool:
    """Return whether a boolean field is set, in a file or in an environment variable."""
    return str(value).lower() in ("true", "1")


def _workers(value: Any) -> dict[str, Any]:
    return {"placement": "thread"} if int(value) == 0 else {"replicas": int(value)}


def _cors(given: Any) -> dict[str, Any]:
    """Return our settings for the keywords of FastAPI's CORS middleware, whose defaults apply."""
    options = dict(parse_json(given) if isinstance(given, str) else given)
    names = {"origins": "allow_origins", "methods": "allow_methods", "headers": "allow_headers"}
    lists = {ours: options.get(theirs) or [] for ours, theirs in {**names, "expose": "expose_headers"}.items()}
    if not all(isinstance(values, list) for values in lists.values()):
        raise TypeError
    lists["methods"] = lists["methods"] or ["GET"]
    return {
        **{f"cors_{name}": ",".join(values) for name, values in lists.items()},
        "cors_origin_regex": options.get("allow_origin_regex") or "",
        "cors_credentials": bool(options.get("allow_credentials")),
        "cors_max_age_s": int(options.get("max_age", 600)),
    }


# Fields whose value differs from that of our setting.
CONVERTERS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "parallel_workers": _workers,
    "use_structured_logging": lambda on: {"log_format": "json" if is_true(on) else "text"},
    "cors_settings": _cors,
    "metrics_endpoint": lambda path: {"metrics_path": path or ""},  # null: no metrics
    "grpc_max_message_length": lambda n: {"max_body_bytes": int(n) if int(n) > 0 else (1 << 31) - 1},
}
