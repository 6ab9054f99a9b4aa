"""Output of `dragoman serve` at start: steps of loading, then models, addresses and first requests."""

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dragoman.cli.first_requests import first_requests
from dragoman.cli.terminal import colour_text, format_bytes, live_display, printable, table
from dragoman.engine.deployment import Deployment
from dragoman.server import Server

log = logging.getLogger("dragoman.server")

# Interval at which models that still load are reported in a log, and redrawn on a terminal.
_SLOW_S = 3.0
_REDRAW_S = 0.25
# Models that a terminal shows while they load.
_MAX_ROWS = 12


async def progress(server: Server) -> None:
    """Return when every model is loaded or has failed; show the steps of loading meanwhile."""
    live = live_display(sys.stderr) if server.settings.log_format == "text" else None
    if live is None:
        await _report(server)
    else:
        await _draw(server, live)


async def _report(server: Server) -> None:
    """Log the models that still load, every few seconds."""
    began_s = reported_s = time.monotonic()
    while not server.engine.started:
        await _wait_for_change(server, reported_s + _SLOW_S - time.monotonic())
        now_s = time.monotonic()
        if now_s - reported_s >= _SLOW_S and not server.engine.started:
            reported_s = now_s
            models = server.engine.deployments()
            slow = [f"{d.spec.name} ({_step(d)})" for d in models if d.state == "LOADING"]
            some = ", ".join(slow[:5]) + (", ..." if len(slow) > 5 else "")
            progress = f"{len(models) - len(slow)} of {len(models)} models"
            log.info("loaded %s after %.0f s; still loading %s", progress, now_s - began_s, some)


async def _wait_for_change(server: Server, timeout_s: float) -> None:
    change = asyncio.ensure_future(server.engine.wait_for_change())
    try:
        await asyncio.wait({change}, timeout=max(0.0, timeout_s))
    finally:
        change.cancel()


def _step(deployment: Deployment) -> str:
    return f"{deployment.step.name} {format_bytes(deployment.step.size)}".rstrip()


# --- on a terminal ---------------------------------------------------------------------------------------------------


async def _draw(server: Server, live: Any) -> None:
    """Show a line for each model until it is loaded; log lines appear above them."""
    began_s: dict[Deployment, float] = {}
    ended_s: dict[Deployment, float] = {}
    with live, _log_above(live):
        while not server.engine.started:
            live.update(_loading_lines(server, began_s, ended_s))
            await _wait_for_change(server, _REDRAW_S)


@contextmanager
def _log_above(live: Any) -> Iterator[None]:
    """Let handlers of the log write through the display, which `sys.stderr` does while it is shown."""
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler)]
    streams = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            if stream is not None:
                handler.setStream(stream)


def _loading_lines(server: Server, began_s: dict[Deployment, float], ended_s: dict[Deployment, float]) -> Any:
    """Return what the display shows: a line for each model."""
    from rich.table import Table
    from rich.text import Text

    now_s = time.monotonic()
    models = server.engine.deployments()
    for deployment in models:
        if deployment.state != "LOADING" or deployment.step.name != "waiting":
            began_s.setdefault(deployment, now_s)
        if deployment.state != "LOADING":
            ended_s.setdefault(deployment, now_s)
    shown = sorted(models, key=lambda d: d.state != "LOADING")[:_MAX_ROWS]
    lines = Table.grid(padding=(0, 2))
    for deployment in shown:
        spent_s = ended_s.get(deployment, now_s) - began_s.get(deployment, now_s)
        state, style = _shown_state(deployment)
        name = f"{deployment.spec.name} {deployment.spec.version}".rstrip()
        lines.add_row(Text(f"  {printable(name)}"), Text(state, style), Text(f"{spent_s:.0f} s", "dim"))
    if len(models) > len(shown):
        lines.add_row(Text(f"  and {len(models) - len(shown)} more", "dim"), Text(""), Text(""))
    return lines


def _shown_state(deployment: Deployment) -> tuple[str, str]:
    if deployment.state == "LOADING":
        return _step(deployment), "yellow"
    return ("warm", "green") if deployment.ready else ("failed", "red")


# --- once started ----------------------------------------------------------------------------------------------------


def startup_line(server: Server, took_s: float) -> None:
    """Log the content of the table as one line."""
    states = {f"{d.spec.name}/{d.spec.version}".rstrip("/"): d.reported_state for d in server.engine.deployments()}
    state = "ready" if server.engine.ready() else "started, not ready"
    addresses = {"http": server.http_url, "grpc": server.grpc_url}
    log.info("%s in %.2f s", state, took_s, extra={**addresses, "models": states})


def startup_table(server: Server, took_s: float) -> None:
    """Print models, versions, states, addresses and the first requests to try."""
    models = server.engine.deployments()
    lines = ["", *_model_lines(server), ""]
    if not has_failed(server):
        lines += [*_address_lines(server), *_request_lines(server), ""]
    lines += [f"  {_last_line(server, models, took_s)}", ""]
    print("\n".join(lines), file=sys.stderr, flush=True)


def has_failed(server: Server) -> bool:
    """Return whether nothing is and will be served, so that the server ends.

    Models that were unloaded meanwhile are missing here, which is not a failure.
    """
    models = server.engine.deployments()
    return bool(models) and all(d.state == "UNAVAILABLE" and not d.retries for d in models)


def _model_lines(server: Server) -> list[str]:
    rows = [("model", "version", "platform", "runs in", "state")]
    errors = []
    for deployment in server.engine.deployments():
        spec, state = deployment.spec, deployment.reported_state
        shown = f"{state.lower()}, trial failed" if deployment.ready and deployment.trial_error else state.lower()
        rows.append((spec.name, spec.version or "-", deployment.platform or "-", deployment.placement, shown))
        if deployment.reason:
            again = "; it is loaded again until that works" if deployment.retries else ""
            errors.append(f"  {spec.name}: {printable(deployment.reason)}{again}")
        elif deployment.ready and deployment.trial_error:
            errors.append(f"  {spec.name}: answered no example: {printable(deployment.trial_error)}")
        details = deployment.loaded.details if deployment.is_loaded else {}
        for adapter, reason in details.get("skipped_adapters", {}).items():
            rows.append((f"{spec.name}:{adapter}", "-", "-", "-", "skipped"))
            errors.append(f"  {spec.name}:{adapter}: {printable(reason)}")
    for skipped in server.engine.skipped_files():
        rows.append((skipped.file, "-", "-", "-", "skipped"))
        errors.append(f"  {skipped.file}: {skipped.reason}")
    models = table(rows, sys.stderr, "  ") if len(rows) > 1 else ["  no model is loaded yet"]
    return [*models, *(["", *errors] if errors else [])]


def _address_lines(server: Server) -> Iterator[str]:
    if server.http_url:
        yield f"  HTTP  {', '.join(server.bound_urls)}   {', '.join(server.http_protocols)}"
    if server.grpc_url:
        yield f"  gRPC  {server.bound_grpc_address}   {', '.join(server.grpc_protocols)}"
    if server.admin_url:
        yield f"  admin {server.admin_url}   metrics, model control"
    if server.worker_port is not None:
        address = server.worker_port.address
        yield f"  workers {address}   dragoman worker --join {address}"
    if server.http_url and server.settings.web_pages:
        yield f"  pages {server.http_url}/   console; API at /docs"


def _request_lines(server: Server) -> Iterator[str]:
    for number, command in enumerate(first_requests(server)):
        if not number:
            yield ""
        yield f"  {'try   ' if not number else '      '}{command}"


def _last_line(server: Server, models: list[Deployment], took_s: float) -> str:
    if has_failed(server):
        return colour_text("no model could be loaded: the server ends", "31", sys.stderr)
    if server.engine.ready():
        return colour_text(f"ready in {took_s:.2f} s; Ctrl-C stops", "32", sys.stderr)
    waiting = sum(not deployment.ready for deployment in models)
    problem = f"{waiting} of {len(models)} models not ready" if models else "no model is loaded yet"
    return colour_text(f"started in {took_s:.2f} s, {problem}; Ctrl-C stops", "33", sys.stderr)
