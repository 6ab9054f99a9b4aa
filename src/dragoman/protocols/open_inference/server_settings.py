"""The extensions for trace and log settings: read and change them, over REST and gRPC."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.formats import grpc_messages as m
from dragoman.formats.json_numbers import PARSER_ERRORS, describe_parser_error
from dragoman.formats.json_scan import check_json
from dragoman.protocols.open_inference.extensions import authorized_call
from dragoman.protocols.open_inference.messages import LogSettings
from dragoman.protocols.wire import (
    JSON,
    EngineCall,
    GrpcMethod,
    GrpcRequest,
    HttpRequest,
    HttpResponse,
    Operation,
    Policy,
    Route,
    json_response,
)
from dragoman.system.logs import LogOptions, log_options, set_log_options
from dragoman.system.trace_settings import TraceSettings

_SETTINGS = msgspec.json.Decoder(dict[str, Any])
_MAX_RATE = (1 << 32) - 1
_LEVELS = ("OFF", "TIMESTAMPS")
_LOG_FORMATS = ("default", "ISO8601")
_FLAGS = ("log_info", "log_warning", "log_error")
_MODE = "opentelemetry"
_TRACE_CHANGES = dict[str, str | list[str] | None]


def routes(policy: Policy) -> list[Route]:
    """Return the routes of REST."""
    table = []
    for path, subject, read_and_change, settings in (
        ("/v2/trace/setting", "Trace settings", _trace_response, _TRACE_CHANGES),
        ("/v2/models/{model}/trace/setting", "Trace settings of a model", _trace_response, _TRACE_CHANGES),
        ("/v2/logging", "Log settings", _log_response, LogSettings),
    ):
        body = {200: {JSON: dict[str, Any]}}
        get = Operation(f"{subject}: read", body)
        post = Operation(f"{subject}: change", body, {JSON: settings}, is_body_required=False)
        endpoint = partial(_rest_call, policy, read_and_change)
        table += [Route("GET", path, endpoint, operation=get), Route("POST", path, endpoint, operation=post)]
    return table


def methods(policy: Policy) -> tuple[GrpcMethod, ...]:
    """Return the methods of gRPC."""
    return (
        GrpcMethod("TraceSetting", partial(_grpc_traces, policy)),
        GrpcMethod("LogSettings", partial(_grpc_logs, policy)),
    )


# --- REST ------------------------------------------------------------------------------------------------


def _rest_call(
    policy: Policy, respond: Callable[[Policy, str, Mapping[str, Any]], Mapping[str, Any]], http: HttpRequest
) -> EngineCall[Any, HttpResponse]:
    changes = _parse_settings(http, policy) if http.method == "POST" and len(http.body) else {}
    model = http.params.get("model", "")
    change = (_SUBJECTS[respond], {"settings": changes}) if changes else None
    return authorized_call(http, lambda: json_response(respond(policy, model, changes)), model, change)


def _parse_settings(http: HttpRequest, policy: Policy) -> dict[str, Any]:
    body = bytes(http.body)
    check_json(body, policy)
    try:
        return _SETTINGS.decode(body)
    except PARSER_ERRORS as error:
        raise InvalidInput(f"the request is not valid: {describe_parser_error(error)}") from error


def _trace_response(policy: Policy, model: str, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    lists = {name: [value] if isinstance(value, str) else value for name, value in changes.items()}
    settings = _change_traces(policy, model, lists)
    return {name: values if name == "trace_level" else values[0] for name, values in settings.items()}


def _log_response(policy: Policy, _model: str, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    return _change_logs(policy, {name: value for name, value in changes.items() if value is not None})


_SUBJECTS: Mapping[Callable[..., Any], str] = {_trace_response: "trace settings", _log_response: "log settings"}

# --- gRPC ------------------------------------------------------------------------------------------------


def _grpc_traces(policy: Policy, request: GrpcRequest) -> EngineCall[Any, bytes]:
    message = m.parse_message(m.TraceSettingRequest, request.body)
    changes = {name: list(setting.value) or None for name, setting in message.settings.items()}

    def respond() -> bytes:
        response = m.TraceSettingResponse()
        for name, values in _change_traces(policy, message.model_name, changes).items():
            response.settings[name].value.extend(values)
        return bytes(response.SerializeToString())

    change = ("trace settings", {"settings": changes}) if changes else None
    return authorized_call(request, respond, message.model_name, change)


def _grpc_logs(policy: Policy, request: GrpcRequest) -> EngineCall[Any, bytes]:
    message = m.parse_message(m.LogSettingsRequest, request.body)
    changes = {}
    for name, setting in message.settings.items():
        kind = setting.WhichOneof("parameter_choice")
        changes[name] = getattr(setting, kind) if kind else None

    def respond() -> bytes:
        response = m.LogSettingsResponse()
        for name, value in _change_logs(policy, changes).items():
            kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
            setattr(response.settings[name], kind, value)
        return bytes(response.SerializeToString())

    return authorized_call(request, respond, change=("log settings", {"settings": changes}) if changes else None)


# --- traces ----------------------------------------------------------------------------------------------


def _require_traces(policy: Policy) -> TraceSettings:
    """Return the trace settings; they exist only where a single process answers requests."""
    if policy.traces is None:
        raise NotSupported("trace and log settings need one process: expected processes 1")
    return policy.traces


def _change_traces(
    policy: Policy, model: str, changes: Mapping[str, Sequence[str] | None]
) -> Mapping[str, Sequence[str]]:
    """Change the trace settings of a model, or of the server; return those that hold then. None resets a setting."""
    traces = _require_traces(policy)
    if changes:
        parsed = dict(_parse_trace_setting(name, values) for name, values in changes.items())
        parsed.pop("", None)
        if not traces.has_tracer and any(parsed.values()):
            raise NotSupported("traces are not exported; start the server with --tracing-endpoint")
        traces.update(model, parsed)
    is_on, rate, count = traces.read(model)
    return {
        "trace_level": ["TIMESTAMPS" if is_on else "OFF"],
        "trace_rate": [str(rate)],
        "trace_count": [str(count)],
        "trace_mode": [_MODE],
    }


def _parse_trace_setting(name: str, values: Sequence[str] | None) -> tuple[str, Any]:
    """Return an option of `TraceOptions` and its value; "" for a setting without effect.

    Raises InvalidInput, or NotSupported for a change that could have no effect.
    """
    if name == "trace_file":
        raise NotSupported("trace file location can not be updated through network protocol")
    if values is not None and not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise InvalidInput(f"'{name}': expected text, got {str(values)[:64]}")
    if name == "trace_level":
        return "is_on", _parse_level(values) if values else None
    if values is not None and len(values) != 1:
        raise InvalidInput(f"expect only 1 value for '{name}'")
    text = None if values is None else values[0]
    match name:
        case "trace_rate":
            return "rate", None if text is None else _parse_number(name, text, 0, _MAX_RATE)
        case "trace_count":
            return "count", None if text is None else _parse_number(name, text, -1, (1 << 31) - 1)
        case "log_frequency" if text in (None, "0"):
            return "", None
        case "trace_mode" if text in (None, _MODE):
            return "", None
        case "log_frequency" | "trace_mode":
            raise NotSupported(f"'{name}': traces are exported to an OpenTelemetry collector only, got {text!r:.64}")
    raise InvalidInput(f"unknown trace setting '{name[:64]}'")


def _parse_level(levels: Sequence[str]) -> bool:
    if "OFF" in levels and len(levels) > 1:
        raise InvalidInput("Expect only one trace level 'OFF' is specified")
    for level in levels:
        if level == "TENSORS":
            raise NotSupported("'trace_level': values of tensors are not traced; expected TIMESTAMPS or OFF")
        if level not in _LEVELS:
            raise InvalidInput(f"'trace_level': expected TIMESTAMPS or OFF, got {level!r:.64}")
    return levels != ["OFF"]


def _parse_number(name: str, text: str, least: int, most: int) -> int:
    digits = text.removeprefix("-")
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 20:
        raise InvalidInput(f"Unable to parse '{name}', got: {text[:32]}")
    number = int(text)
    if name == "trace_count" and number < least:
        raise InvalidInput(f"Unable to parse 'trace_count'. Expecting value >= -1, got:{number}")
    if not least <= number <= most:
        limits = f"value is out of range [ {least}, {most} ]"
        raise InvalidInput(f"Unable to parse '{name}', {limits}, got: {number}")
    return number


# --- log -------------------------------------------------------------------------------------------------


def _change_logs(policy: Policy, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Change the log settings and return those that hold then."""
    _require_traces(policy)
    options = log_options()
    if options is None:
        raise NotSupported("the log is set up by the program that runs the server, which has its settings")
    if changes:
        changed = options
        for name, value in changes.items():
            changed = _change_option(changed, name, value)
        try:
            set_log_options(changed)
        except ValueError as error:
            raise NotSupported(f"'log_format': {error}") from error
        options = changed
    return {
        "log_file": "",
        **{f"log_{level}": getattr(options, level) for level in ("info", "warning", "error")},
        "log_verbose_level": options.debug,
        "log_format": _LOG_FORMATS[options.has_iso_times],
    }


def _change_option(options: LogOptions, name: str, value: Any) -> LogOptions:
    if name == "log_file":
        raise NotSupported("log file location can not be updated through network protocol")
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise InvalidInput(f"expect boolean for '{name}'")
        return replace(options, **{name.removeprefix("log_"): value})
    if name == "log_verbose_level":
        is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())  # 2.0 is an integer in JSON
        if not is_whole or not 0 <= value <= _MAX_RATE:
            raise InvalidInput(f"expect int32 for '{name}'")
        return replace(options, debug=int(value))
    if name == "log_format":
        if not isinstance(value, str):
            raise InvalidInput(f"expect string for '{name}'")
        if value not in _LOG_FORMATS:
            raise InvalidInput(f"invalid argument for log_format, got: {value[:64]}")
        return replace(options, has_iso_times=value == _LOG_FORMATS[1])
    raise InvalidInput(f"unknown log setting '{name[:64]}'")
