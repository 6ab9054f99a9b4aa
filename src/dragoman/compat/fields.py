"""What becomes of every field of settings.json and model-settings.json: one table for the server, doctor and docs."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dragoman.core.errors import InvalidInput

log = logging.getLogger("dragoman.compat")

# same: it does here what it did. different: it is honoured in a way that is worth knowing. unused: nothing is lost
# by going on without it. missing: what it asks for is not there, and the rest works. refused: nothing starts.
Effect = Literal["same", "different", "unused", "missing", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its default, what becomes of another value, and what to do about it. `setting` is our name for it."""

    effect: Effect
    told: str = ""
    setting: str = ""
    default: Any = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What becomes of one field that is set."""

    effect: Effect
    field: str
    told: str


_METRICS = "metrics are told on the HTTP port; listen on further addresses with --http-also"
_METRIC_NAMES = "the server's own metrics have other names: see the page on running it"
_KAFKA = "Kafka is not spoken; consume the topic with a client of yours and send each message to /v2/models/NAME/infer"
_ENVIRONMENT = (
    "a Python environment of a model's own is not supported; install its packages beside Dragoman, or serve the model "
    "by a Dragoman of its own in that environment"
)
_POOL = "each model has worker processes of its own, so there is no pool to share or to keep apart"
_LOGGING = "the log is set by --log-format and --log-level"
_CACHE = "answers are not cached; each request is computed"

SERVER: Mapping[str, Field] = {
    "host": Field("different", "taken as it is; without it Dragoman listens on 127.0.0.1, not on 0.0.0.0", "host"),
    "http_port": Field("same", "", "http_port"),
    "grpc_port": Field("same", "", "grpc_port"),
    "server_name": Field("same", "", "server_name"),
    "gzip_enabled": Field("same", "", "compress_responses"),
    "grpc_max_message_length": Field("different", "the limit holds for bodies over HTTP too", "max_body_bytes"),
    "parallel_workers": Field(
        "different",
        "each model gets that many workers of its own, not all models in each; 0 runs models in the server's process",
        "replicas",
    ),
    "use_structured_logging": Field("same", "", "log_format"),
    "debug": Field("unused", "faults are logged in full and never sent to clients; see --log-level", "", True),
    "parallel_workers_timeout": Field("unused", "a worker that dies is restarted; see --drain-s for the end", "", 5),
    "server_version": Field("unused", "metadata tell the version of Dragoman"),
    "extensions": Field("unused", "metadata tell the extensions that are there", "", []),
    "environments_dir": Field("unused", _ENVIRONMENT),
    "metrics_endpoint": Field("same", "", "metrics_path"),
    "metrics_port": Field("different", _METRICS, "", 8082),
    "metrics_rest_server_prefix": Field("different", _METRIC_NAMES, "", "rest_server"),
    "metrics_dir": Field("unused", "the server makes a folder of its own for them"),
    "logging_settings": Field("unused", _LOGGING),
    "root_path": Field("same", "", "root_path"),
    "cors_settings": Field("same", "", "cors_origins"),
    "tracing_server": Field("missing", "no traces are sent"),
    "cache_enabled": Field("unused", _CACHE, "", False),
    "cache_size": Field("unused", _CACHE, "", 100),
    "load_models_at_startup": Field("same", "", "load_at_start"),
    "model_repository_root": Field("refused", "serve that folder itself: dragoman serve FOLDER", "", "."),
    "model_repository_implementation": Field("refused", "models are found in folders; write them to one"),
    "model_repository_implementation_args": Field("unused", "it goes with model_repository_implementation", "", {}),
    "kafka_enabled": Field("refused", _KAFKA, "", False),
    "kafka_servers": Field("unused", _KAFKA),
    "kafka_topic_input": Field("unused", _KAFKA),
    "kafka_topic_output": Field("unused", _KAFKA),
}

MODEL: Mapping[str, Field] = {
    "name": Field("same"),
    "implementation": Field("same"),
    "platform": Field("same"),
    "inputs": Field("different", "told by metadata, and they choose codecs; checked where the runtime is ours"),
    "outputs": Field("different", "told by metadata, and they choose codecs; checked where the runtime is ours"),
    "max_batch_size": Field(
        "different", "only calls of equal shapes and parameters merge, while it is busy; a request of more rows is 400"
    ),
    "max_batch_time": Field("same"),
    "parameters": Field("same"),
    "versions": Field("unused", "the versions are those that are there; see parameters.version", "", []),
    "parallel_workers": Field("different", "this model gets that many workers; 0 runs it in the server's process"),
    "warm_workers": Field("unused", "workers are always warm", "", False),
    "cache_enabled": Field("unused", _CACHE, "", False),
}

PARAMETERS: Mapping[str, Field] = {
    "uri": Field("same"),
    "version": Field("same"),
    "content_type": Field("same"),
    "extra": Field("same"),
    "format": Field("unused", "the file itself tells its format"),
    "inference_pool_gid": Field("unused", _POOL),
    "autogenerate_inference_pool_gid": Field("unused", _POOL, "", False),
    "environment_path": Field("refused", _ENVIRONMENT),
    "environment_tarball": Field("refused", _ENVIRONMENT),
}


def findings(given: Mapping[str, Any], table: Mapping[str, Field], prefix: str = "") -> Iterator[Finding]:
    """What becomes of each field that is set, but not to what it is without being set."""
    for name, value in given.items():
        known = table.get(name)
        if known is None:
            # Keywords of a model's own are for its code alone.
            own = Finding("same", prefix + name, "handed to the model's code")
            yield own if table is PARAMETERS else Finding("unused", prefix + name, "no such field is known")
        elif known.effect in ("same", "different") or not _as_unset(value, known.default):
            yield Finding(known.effect, prefix + name, known.told)


def tell(found: Iterable[Finding], path: Path) -> None:
    """Log what is passed over of the fields in a file; InvalidInput refuses one that nothing may start with."""
    for each in found:
        if each.effect == "refused":
            raise InvalidInput(f"{path}: '{each.field}' is not supported: {each.told}")
        if each.effect in ("unused", "missing"):
            level = logging.WARNING if each.effect == "missing" else logging.INFO
            log.log(level, "%s: '%s' is passed over: %s", path, each.field, each.told)


def _as_unset(value: Any, default: Any) -> bool:
    """Whether a field is what it is without being set; the environment writes `false` for False."""
    return value is None or str(value).lower() == str(default).lower()


def _workers(value: Any) -> dict[str, Any]:
    return {"placement": "thread"} if int(value) == 0 else {"replicas": int(value)}


def _cors(given: Any) -> dict[str, Any]:
    """FastAPI's keywords; what is not said there is as its middleware has it."""
    found = json.loads(given) if isinstance(given, str) else dict(given)
    named = {"allow_origins": "origins", "allow_methods": "methods", "allow_headers": "headers"}
    lists = {ours: found.get(theirs) or [] for theirs, ours in {**named, "expose_headers": "expose"}.items()}
    lists["methods"] = lists["methods"] or ["GET"]
    return {
        **{f"cors_{name}": ",".join(values) for name, values in lists.items()},
        "cors_origin_regex": found.get("allow_origin_regex") or "",
        "cors_credentials": bool(found.get("allow_credentials")),
        "cors_max_age_s": int(found.get("max_age", 600)),
    }


# Where our setting is not simply the value of theirs.
CONVERTED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "parallel_workers": _workers,
    "use_structured_logging": lambda on: {"log_format": "json" if str(on).lower() in ("true", "1") else "text"},
    "cors_settings": _cors,
    "grpc_max_message_length": lambda n: {"max_body_bytes": int(n) if int(n) > 0 else (1 << 31) - 1},
}
