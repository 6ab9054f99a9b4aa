"""Output of `dragoman serve` at start: steps of loading, then models, addresses and first requests."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from dragoman.cli.first_requests import first_requests
from dragoman.cli.terminal import LiveLines, colour_text, format_bytes, is_interactive, printable, table
from dragoman.engine.deployment import Deployment
from dragoman.server import Server
from dragoman.system.load_steps import LoadStep

log = logging.getLogger("dragoman.server")

# Interval after which models that still load are logged first; it doubles up to the second one. A terminal shows them
# all the time.
_SLOW_S, _SLOWEST_S = 3.0, 30.0
_REDRAW_S = 0.25
_MAX_SHOWN = 5  # models that still load


async def progress(server: Server) -> None:
    """Return when every model is loaded or has failed; show the steps of loading meanwhile.

    A terminal shows one line that is rewritten; a log has a line now and then.
    """
    if server.settings.log_format == "text" and is_interactive(sys.stderr):
        with LiveLines(sys.stderr) as live:
            await _observe(
                server, lambda counts, parts, _: live.update(["  " + "; ".join(filter(None, (counts, parts)))])
            )
    else:
        await _observe(server, _log_if_due)


def _log_if_due(counts: str, parts: str, is_due: bool) -> None:
    if is_due:
        log.info("loaded %s%s", counts, f"; still loading {parts}" if parts else "")


async def _observe(server: Server, show: Callable[[str, str, bool], None]) -> None:
    """Call `show` now and then with how many models are loaded, what the others do, and whether a log is due."""
    began_s = time.monotonic()
    due_s = pause_s = _SLOW_S
    steps: dict[Deployment, tuple[LoadStep, float]] = {}  # with the time at which each began
    while not server.engine.started:
        now_s = time.monotonic()
        for deployment in server.engine.deployments():
            if deployment not in steps or steps[deployment][0] != deployment.step:
                steps[deployment] = (deployment.step, now_s)
        is_due = now_s - began_s >= due_s
        if is_due:
            pause_s = min(2 * pause_s, _SLOWEST_S)
            due_s += pause_s
        show(*_describe_progress(server, steps, now_s - began_s), is_due)
        await _wait_for_start(server, _REDRAW_S)


def _describe_progress(
    server: Server, steps: Mapping[Deployment, tuple[LoadStep, float]], spent_s: float
) -> tuple[str, str]:
    """Return how many models are loaded, and what the others do: those with the longest step first."""
    models, now_s = server.engine.deployments(), time.monotonic()
    slow = [d for d in models if d.state == "LOADING"]
    active = sorted((d for d in slow if d.step.name != "waiting"), key=lambda d: steps.get(d, (d.step, now_s))[1])
    shown: dict[str, tuple[float, list[str]]] = {}  # by step: models that import the same package wait for each other
    for deployment in active[:_MAX_SHOWN]:
        step, since_s = steps.get(deployment, (deployment.step, now_s))
        text = f"{step.name} {format_bytes(step.size)}".rstrip()
        shown.setdefault(text, (now_s - since_s, []))[1].append(deployment.spec.name)
    parts = [f"{', '.join(map(printable, names))} ({text}, {s:.0f} s)" for text, (s, names) in shown.items()]
    return f"{len(models) - len(slow)} of {len(models)} models after {spent_s:.0f} s", ", ".join(parts)


async def _wait_for_start(server: Server, timeout_s: float) -> None:
    """Return once the server has started, or after `timeout_s`: each model that is loaded is several changes."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not server.engine.started:
                await server.engine.wait_for_change()


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
        yield f"  join  {address}   dragoman worker --join {address} --secret-file FILE"
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
