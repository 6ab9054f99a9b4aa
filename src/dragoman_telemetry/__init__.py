"""Traces, metrics and logs for an OpenTelemetry collector: the entry point of the group `dragoman.telemetry`.

Only modules that `signals` imports use OpenTelemetry, once something is exported.
"""

import logging
import os
from typing import Final
from urllib.parse import urlsplit

from dragoman.core.errors import InvalidInput
from dragoman.settings import Settings
from dragoman.system.trace_context import Sampler
from dragoman.transports.observation import Telemetry

log = logging.getLogger("dragoman.telemetry")
PROTOCOLS: Final = {"http/protobuf": "tracing", "grpc": "tracing-grpc"}  # and the extra that installs them


def make_telemetry(settings: Settings) -> Telemetry | None:
    """Return what is exported by the settings and OpenTelemetry's variables, None for nothing.

    `tracing_endpoint` or a variable of an endpoint turns traces on, OTEL_METRICS_EXPORTER=otlp metrics, and
    OTEL_LOGS_EXPORTER=otlp logs. A missing package or an unknown protocol is an error for the setting, and a warning
    for the variables, which are often set for all containers of a cluster. Raises InvalidInput.
    """
    endpoint = settings.tracing_endpoint
    if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc):
        raise InvalidInput(f"setting 'tracing_endpoint': expected http://host:port or https://, got {endpoint!r}")
    signals = [signal for signal in ("traces", "metrics", "logs") if _is_on(signal, endpoint)]
    if not signals:
        return None
    protocols = {signal: _protocol(signal) for signal in signals}
    try:
        unknown = next((name for name in protocols.values() if name not in PROTOCOLS), "")
        if unknown:
            expected = " or ".join(PROTOCOLS)
            raise InvalidInput(f"OTEL_EXPORTER_OTLP_PROTOCOL: expected {expected}, got {unknown!r}")
        try:
            from dragoman_telemetry.signals import start

            sampler = _make_sampler(settings.tracing_ratio) if "traces" in signals else None
            return start(protocols, endpoint, "https" if settings.tls_cert else "http", sampler)
        except ModuleNotFoundError as error:
            extras = ",".join(sorted({PROTOCOLS[name] for name in protocols.values()}))
            raise InvalidInput(f"a package is missing: pip install 'dragoman[{extras}]'") from error
    except InvalidInput as error:
        if endpoint:
            raise InvalidInput(f"setting 'tracing_endpoint': {error.message}") from error
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing is exported: %s", error.message)
        return None


def _is_on(signal: str, endpoint: str) -> bool:
    """Return whether a signal is exported. Metrics cost time for each request, so an endpoint alone is not enough."""
    has_endpoint = endpoint or any(_variable(f"EXPORTER_OTLP_{name}") for name in ("ENDPOINT", f"{signal}_ENDPOINT"))
    exporter = _variable(f"{signal}_EXPORTER").lower()
    if not endpoint and _variable("SDK_DISABLED").lower() == "true":
        return False
    if exporter not in ("", "none", "otlp"):
        log.warning("OTEL_%s_EXPORTER: expected otlp or none, got %r", signal.upper(), exporter)
        return False
    if signal == "traces":
        return bool(endpoint or (has_endpoint and exporter != "none"))
    return bool(has_endpoint) and exporter == "otlp"


def _protocol(signal: str) -> str:
    return _variable(f"EXPORTER_OTLP_{signal}_PROTOCOL") or _variable("EXPORTER_OTLP_PROTOCOL") or "http/protobuf"


def _variable(name: str) -> str:
    return os.environ.get(f"OTEL_{name.upper()}", "").strip()


def _make_sampler(ratio: float) -> Sampler:
    """Return the sampler for a ratio; below 0 the one that `OTEL_TRACES_SAMPLER` and its argument name.

    An unknown sampler or an invalid argument is logged; then all requests are traced, as OpenTelemetry says.
    """
    if ratio >= 0:
        return Sampler(ratio)
    name = _variable("TRACES_SAMPLER").lower() or "parentbased_always_on"
    ratios = {"always_on": 1.0, "always_off": 0.0, "traceidratio": 1.0}
    kind = name.removeprefix("parentbased_")
    if kind not in ratios:
        known = ", ".join([*ratios, *(f"parentbased_{each}" for each in ratios)])
        log.warning("OTEL_TRACES_SAMPLER: expected one of %s, got %r; tracing all requests", known, name)
        return Sampler(1.0)
    return Sampler(_sampled_ratio() if kind == "traceidratio" else ratios[kind], name.startswith("parentbased_"))


def _sampled_ratio() -> float:
    text = _variable("TRACES_SAMPLER_ARG") or "1"
    try:
        if 0 <= (ratio := float(text)) <= 1:
            return ratio
    except ValueError:
        pass
    log.warning("OTEL_TRACES_SAMPLER_ARG: expected a number from 0 to 1, got %r; tracing all requests", text)
    return 1.0
