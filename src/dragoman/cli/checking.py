"""`dragoman serve --check`: everything that would keep the server from starting, without a start."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from dragoman.assembly import access_control, http_addresses, load_protocols, transport_limits
from dragoman.cli.serving import explain_address
from dragoman.cli.terminal import printable
from dragoman.core.errors import DragomanError
from dragoman.core.model_digests import read_digests
from dragoman.core.options import forget_secrets
from dragoman.core.state_store import check_state
from dragoman.engine.folder_watch import check_watch
from dragoman.engine_setup import make_audit_writer, model_errors, served_paths, setting_errors
from dragoman.server_transports import check_kafka, configured_ports, make_worker_port, tls_files
from dragoman.settings import Settings
from dragoman.system.sockets import listening_socket
from dragoman.transports.tls import expiry_s

# Credentials, each of which is checked without the others, because one that is invalid would hide them.
_CREDENTIALS = (("api_keys",), ("api_key",), ("control_token",), ("jwt_jwks", "jwt_issuer", "jwt_audience"))


def check(paths: Sequence[str], flags: Mapping[str, Any]) -> int:
    """Print a line for each error that `dragoman serve` would stop at; return 0 without one, else 2."""
    environment = {**os.environ}
    forget_secrets()
    served = served_paths(paths, environment, setting_errors((), environment, flags)[1])
    names: list[str] = []
    found = list(dict.fromkeys(_errors(served, environment, flags, names)))
    for each in found:
        print(f"dragoman: {printable(each)}", file=sys.stderr)
    if found:
        print(f"dragoman: the server would not start as intended: errors={len(found)}", file=sys.stderr)
        return 2
    print(f"dragoman: no error found: models={len(names)}")
    return 0


def _errors(
    paths: Sequence[str], environment: Mapping[str, str], flags: Mapping[str, Any], names: list[str]
) -> Iterator[str]:
    errors, settings = setting_errors(paths, environment, flags)
    yield from errors
    yield from _setting_groups(settings)
    yield from _certificate(settings)
    yield from _addresses(settings)
    if not paths and not settings.can_add_models:
        yield "nothing to serve; required: PATH, a model file, a folder or module:object"
    for path in paths:
        for subject, message in model_errors([path], settings, names):
            yield message if subject in message else f"{subject}: {message}"
    if settings.watch:
        yield from _error_of(lambda: check_watch(paths))


def _error_of(run: Any) -> Iterator[str]:
    try:
        run()
    except DragomanError as error:
        yield error.message


def _setting_groups(settings: Settings) -> Iterator[str]:
    """Yield the errors of settings that belong together, group by group."""
    yield from _error_of(lambda: load_protocols(settings))
    yield from _error_of(lambda: http_addresses(settings))
    yield from _error_of(lambda: transport_limits(settings))
    for group in _CREDENTIALS:
        others = {name: "" for names in _CREDENTIALS if names != group for name in names}
        yield from _error_of(lambda others=others: access_control(replace(settings, **others)))
    yield from _error_of(lambda: access_control(settings))
    yield from _error_of(lambda: make_worker_port(settings))
    yield from _error_of(lambda: check_kafka(settings))
    if settings.state:
        yield from _error_of(lambda: check_state(settings.state))
    if settings.model_digests:
        yield from _error_of(lambda: read_digests(settings.model_digests))
    if not settings.audit_log:  # else the file would be made
        yield from _error_of(lambda: make_audit_writer(settings))


def _certificate(settings: Settings) -> Iterator[str]:
    errors = list(_error_of(lambda: tls_files(settings)))
    yield from errors
    if settings.tls_cert and not errors:
        began_s, end_s = expiry_s(settings.tls_cert)
        for is_wrong, bound, word in ((time.time() < began_s, began_s, "from"), (time.time() > end_s, end_s, "until")):
            if is_wrong:
                day = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(bound))
                yield f"setting 'tls_cert': expected a certificate that is valid now, got one valid {word} {day} UTC"


def _addresses(settings: Settings) -> Iterator[str]:
    """Yield why the server cannot listen on each of its addresses, all at once."""
    try:
        ports = configured_ports(settings, *load_protocols(settings))
    except DragomanError:
        return  # already reported
    addresses = [*ports.http, *ports.grpc, *ports.admin]
    if settings.worker_port >= 0:
        addresses.append((settings.worker_host, settings.worker_port))
    with ExitStack() as stack:
        for host, port in dict.fromkeys(addresses) if settings.processes != 1 else addresses:
            try:
                stack.enter_context(listening_socket(host, port, backlog=1))
            except OSError as error:
                error.filename = error.filename or f"{host}:{port}"
                yield explain_address(error, settings)
