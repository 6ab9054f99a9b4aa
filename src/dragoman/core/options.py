"""Options that users choose: how one is declared and parsed, the options of every model, and secret ones.

An option is a field of a dataclass whose annotation is `Annotated[type, Option(...)]`. Flags, environment variables,
file keys, checks and the documentation are made from that one declaration.
"""

import difflib
import functools
import math
import os
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin

from dragoman.core.errors import InvalidInput
from dragoman.core.secret_files import CREDENTIALS, FILE_SUFFIX, find_secret
from dragoman.system.environment import overwrite_variables

Placement = Literal["", "inline", "thread", "process"]
WorkingDirectory = Literal["shared", "own"]

_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Mapping: "a table",
    tuple: "a list",
    list: "a list",
    dict: "a table",
}
_EXPECTED = {bool: "bool", int: "int", float: "float", str: "str", Mapping: "table", tuple: "list"}


def type_words(kind: type) -> str:
    """Return a type as messages name it: `a number`."""
    return _WORDS.get(kind) or kind.__name__


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of an option. `name`, `type`, `choices` and `default` come from the field that it annotates.

    operator_only: rejected in files beside models, because it is a decision about security.
    minimum, maximum: bounds of a number, inclusive.
    secret: only set by its environment variable, never by a flag, which other users of the machine may see.
    not_empty: an empty value is rejected; to leave the option out is to use its default. For addresses and secrets, of
        which an empty one would open the server.
    serve_only: configures sockets, HTTP parsing or processes, which belong to the ASGI server in `dragoman.asgi`.
    common: shown by `dragoman serve --help`, which names only the groups of the others.
    """

    help: str
    group: str = "Models"
    operator_only: bool = False
    secret: bool = False
    not_empty: bool = False
    serve_only: bool = False
    common: bool = False
    minimum: float = 0
    maximum: float = math.inf
    name: str = ""
    type: Any = str
    choices: tuple[str, ...] = ()
    default: Any = None

    def parse(self, raw: Any) -> Any:
        """Return the value of a flag, a variable or a key of a file; raise InvalidInput if it is invalid."""
        if self.choices:
            if raw not in self.choices:
                raise self._invalid(f"one of {', '.join(filter(None, self.choices))}", raw)
            return raw
        if self.type is bool:
            value = raw if isinstance(raw, bool) else _BOOLEANS.get(str(raw).lower())
            if value is None:
                raise self._invalid(type_words(bool), raw)
            return value
        if not self._is_convertible(raw):
            raise self._invalid(type_words(self.type), raw)
        if self.type in (int, float):
            return self._number(raw)
        if self.not_empty and not str(raw).strip():
            raise InvalidInput(
                f"setting '{self.name}': expected a value, got an empty one; leave it out, or unset "
                f"DRAGOMAN_{self.name.upper()}, for the default ({self.shown_default or 'none'})"
            )
        return str(raw) if self.type is str else raw

    @property
    def shown_default(self) -> str:
        """The default for help and documentation; empty if there is none."""
        if self.type is bool:
            return "true" if self.default else "false"
        return (
            "" if self.default in ("", None, ()) else f"{self.default:g}" if self.type is float else str(self.default)
        )

    @property
    def shown_type(self) -> str:
        """The type, the choices or the bounds for the documentation."""
        if self.choices:
            return ", ".join(filter(None, self.choices))
        if not math.isinf(self.maximum):
            return f"{_EXPECTED[self.type]}, {self.minimum:g} to {self.maximum:g}"
        bound = f", from {self.minimum:g}" if self.type in (int, float) and self.minimum else ""
        return _EXPECTED[self.type] + bound

    def _is_convertible(self, raw: Any) -> bool:
        """Return whether the type of a value is accepted: numbers may be strings, strings may be integers or paths."""
        accepted = {int: (int, str), float: (int, float, str), str: (str, int, os.PathLike), tuple: (list, tuple)}
        return isinstance(raw, accepted.get(self.type, self.type)) and not isinstance(raw, bool)

    def _number(self, raw: Any) -> Any:
        try:
            value = self.type(raw)
        except (ValueError, OverflowError) as error:
            raise self._invalid(type_words(self.type), raw) from error
        if not self.minimum <= value <= self.maximum:  # also rejects NaN
            bounds = f"at least {self.minimum}" if math.isinf(self.maximum) else f"{self.minimum} to {self.maximum}"
            raise InvalidInput(f"setting '{self.name}': expected {bounds}, got {value}")
        return value

    def _invalid(self, expected: str, raw: Any) -> InvalidInput:
        return InvalidInput(f"setting '{self.name}': expected {expected}, got {raw!r}")


# Settings that were renamed since the last release: the old name and the new one. The old one is accepted with a
# warning for one release, as a flag, a variable, a key of a file and a keyword argument.
RENAMED: dict[str, str] = {}


def _warn(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4)


def current_name(name: str, given: Iterable[str] = (), warn: Callable[[str], None] = _warn) -> str:
    """Return the name of a setting; for an old name the new one, with a warning.

    given: all names of the same source. Raises InvalidInput if both names are among them.
    """
    if name not in RENAMED:
        return name
    new = RENAMED[name]
    if new in given:
        raise InvalidInput(f"setting '{name}': expected only '{new}', its new name, got both")
    warn(f"setting '{name}' is called '{new}' now; the next release rejects the old name")
    return new


@functools.cache
def options(kind: type) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by name; fields without an `Option` are left out."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return types.MappingProxyType(
        {f.name: option for f in fields(kind) if (option := _complete(f.name, hints[f.name], f.default)) is not None}
    )


def _complete(name: str, hint: Any, default: Any) -> Option | None:
    declared = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Option)), None)
    if declared is None:
        return None
    kind, choices = get_args(hint)[0], ()
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    given = None if default is MISSING else default
    return replace(declared, name=name, type=get_origin(kind) or kind, choices=choices, default=given)


def values(kind: type, source: Any) -> dict[str, Any]:
    return {name: getattr(source, name) for name in options(kind)}


def split_list(text: str) -> tuple[str, ...]:
    """Return the items of a setting that is a comma-separated list."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of how a model is run. Server settings are the defaults; files beside a model override them."""

    allow_pickle: Annotated[
        bool,
        Option(
            "load model files that can run code when loaded (pickle, joblib), or use files or the network",
            operator_only=True,
            common=True,
        ),
    ] = False
    model_digests: Annotated[
        str,
        Option(
            "file with the SHA-256 of each model file, as `dragoman digests` or sha256sum writes it; models with other "
            "files are not loaded",
            operator_only=True,
            not_empty=True,
        ),
    ] = ""
    placement: Annotated[
        Placement,
        Option(
            "where models run: inline (on the event loop), thread or process; by default the model decides", common=True
        ),
    ] = ""
    replicas: Annotated[int, Option("copies of each model that compute at the same time", minimum=1, common=True)] = 1
    max_batch_size: Annotated[
        int,
        Option(
            "merge queued calls into batches of up to this many rows; 1: no batching; 0: 64 if the model declares that "
            "its rows are independent",
            common=True,
        ),
    ] = 0
    max_batch_wait_s: Annotated[
        float, Option("seconds that a batch waits for more rows, even while a worker is idle")
    ] = 0.0
    batch_linger: Annotated[
        float,
        Option(
            "share of the model's mean latency, at most 0.1 s, that a batch waits for clients which resend immediately"
            "; 0: no delay",
            maximum=10,
        ),
    ] = 0.5
    max_queue: Annotated[
        int, Option("calls of a model that may be queued or running; further ones get 503; 0: no limit")
    ] = 1024
    response_cache_bytes: Annotated[
        int, Option("memory per model version for responses to repeated equal requests, in bytes; 0: no response cache")
    ] = 0
    share_caches: Annotated[
        bool,
        Option(
            "let keys share the response cache and the prefix cache, which tells them what others have sent",
            operator_only=True,
        ),
    ] = False
    timeout_s: Annotated[float, Option("deadline in seconds for requests that set none; 0: no deadline")] = 0.0
    trial_s: Annotated[
        float,
        Option("seconds in which a model is tried with example requests at load; 0: not tried"),
    ] = 10.0
    load_timeout_s: Annotated[
        float,
        Option(
            "seconds in which a model must be loaded, without waiting for a scheduler, and one more for each 20 MB "
            "of its files; 0: no limit",
        ),
    ] = 600.0
    cancel_grace_s: Annotated[
        float,
        Option("seconds after which a worker process that still computes a cancelled call is killed; 0: never"),
    ] = 10.0
    heartbeat_s: Annotated[
        float,
        Option("seconds without a heartbeat after which an idle or stopped worker process is not ready; 0: never"),
    ] = 5.0
    max_crashes: Annotated[
        int,
        Option("crashes of a worker process within crash_window_s after which it is not restarted; 0: no limit"),
    ] = 20
    crash_window_s: Annotated[float, Option("seconds in which max_crashes are counted")] = 600.0
    idempotent: Annotated[
        bool,
        Option("compute a call again on another worker if its worker is lost; streams are not repeated"),
    ] = False
    working_directory: Annotated[
        WorkingDirectory,
        Option("working directory of worker processes: shared (the server's) or own (a new, empty one each)"),
    ] = "shared"
    script_arguments: Annotated[
        str, Option("command-line arguments of a KServe model's script, such as --predictor_host=HOST; also after --")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of the port that workers on other machines join."""

    worker_port: Annotated[
        int,
        Option(
            "port that workers on other machines join with `dragoman worker --join`; 0: any free port, -1: none",
            "Addresses",
            minimum=-1,
            maximum=65535,
            operator_only=True,
            serve_only=True,
        ),
    ] = -1
    worker_host: Annotated[
        str,
        Option(
            "address of the worker port; default: that of the other ports",
            "Addresses",
            operator_only=True,
            not_empty=True,
            serve_only=True,
        ),
    ] = ""
    worker_timeout_s: Annotated[
        float,
        Option(
            "seconds without a heartbeat after which a worker that has joined is lost",
            "Addresses",
            minimum=0.5,
            serve_only=True,
        ),
    ] = 15.0
    worker_secret_file: Annotated[
        str,
        Option(
            "file with the secret of server and workers, 20 characters or more",
            "Security and model control",
            operator_only=True,
            not_empty=True,
            serve_only=True,
        ),
    ] = ""
    worker_secret: Annotated[
        str,
        Option(
            "the secret itself; only as environment variable",
            "Security and model control",
            operator_only=True,
            secret=True,
            not_empty=True,
            serve_only=True,
        ),
    ] = ""
    worker_plaintext: Annotated[
        bool,
        Option(
            "let workers on other machines join without TLS; for isolated networks",
            "Security and model control",
            operator_only=True,
            serve_only=True,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class KafkaOptions:
    """Options of the input of messages of Kafka."""

    kafka_servers: Annotated[
        str,
        Option(
            "Kafka brokers from which requests are read, such as host:port,host:port; needs `dragoman[kafka]`",
            "Protocols",
            operator_only=True,
        ),
    ] = ""
    kafka_topic_input: Annotated[str, Option("topic of the requests", "Protocols")] = "mlserver-input"
    kafka_topic_output: Annotated[str, Option("topic of the responses", "Protocols")] = "mlserver-output"
    kafka_group: Annotated[
        str, Option("consumer group of servers that share the messages; default: each server gets all", "Protocols")
    ] = ""
    kafka_properties: Annotated[
        str,
        Option("file with properties of librdkafka, such as security.protocol=ssl", "Protocols", operator_only=True),
    ] = ""


# Settings whose values are secret, by name. Their environment variables are removed once they have been read.
SECRET_SETTINGS = ("api_key", "control_token", "worker_secret")
_VARIABLES = frozenset(f"DRAGOMAN_{name.upper()}" for name in SECRET_SETTINGS)
# Variables that name files of secrets; `worker_secret_file` is a setting.
SECRET_FILES = frozenset(f"{variable}{FILE_SUFFIX}" for variable in _VARIABLES) - {"DRAGOMAN_WORKER_SECRET_FILE"}
# All that says where secrets are, besides the variables with the secrets themselves.
SECRET_SOURCES = SECRET_FILES | {CREDENTIALS}
# OpenTelemetry's variables of headers for a collector, which may hold its key: for all signals, and for each.
_COLLECTOR_HEADERS = (
    "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS",
    "OTEL_EXPORTER_OTLP_LOGS_HEADERS",
)  # fmt: skip
_forgotten: dict[str, str] = {}


def child_environment(*, runs_models: bool) -> dict[str, str]:
    """Return a copy of this process's environment without the server's secrets.

    Children that run no models get the headers for a collector of telemetry.
    """
    known = {**os.environ, **_forgotten}
    environment = {name: value for name, value in os.environ.items() if name not in (*_VARIABLES, *_COLLECTOR_HEADERS)}
    return environment if runs_models else {**environment, **{n: known[n] for n in _COLLECTOR_HEADERS if n in known}}


def collector_headers(signal: str) -> str:
    """Return the headers for a collector as OpenTelemetry's variables have them. signal: traces, metrics or logs.

    Raises InvalidInput for an invalid file of such a variable.
    """
    known = {**os.environ, **_forgotten}
    return find_secret(f"OTEL_EXPORTER_OTLP_{signal.upper()}_HEADERS", known) or (
        find_secret(_COLLECTOR_HEADERS[0], known) or ""
    )


def secrets_in_files(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secret settings whose values are in files. Raises InvalidInput."""
    secrets = {}
    for name in SECRET_SETTINGS:
        variable = f"DRAGOMAN_{name.upper()}"
        found = find_secret(variable, environment)
        is_setting = variable in environment or variable + FILE_SUFFIX in environment.keys() - SECRET_FILES
        if found is not None and not is_setting:
            secrets[name] = found
    return secrets


def forget_secrets(*, runs_models: bool = False) -> None:
    """Remove the server's secrets from this process's environment, once they have been read, and from what the kernel
    shows of it. A process that only runs models does not keep the headers for a collector of telemetry either."""
    overwrite_variables({*_VARIABLES, *_COLLECTOR_HEADERS})
    for name in _VARIABLES:
        os.environ.pop(name, None)
    for name in _COLLECTOR_HEADERS:
        if name in os.environ:
            value = os.environ.pop(name)
            if not runs_models:
                _forgotten[name] = value
