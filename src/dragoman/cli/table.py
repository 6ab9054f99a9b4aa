"""Output of `dragoman serve` at start: progress of loading, then a table of models and addresses."""

import asyncio
import logging
import sys
import time
from collections.abc import Sequence

from dragoman.server import Server

log = logging.getLogger("dragoman.server")

# Interval at which models that still load are reported.
_SLOW_S = 3.0


async def progress(server: Server) -> None:
    """Return when every model is loaded or has failed; report slow ones meanwhile."""
    engine = server.engine
    began_s = reported_s = time.monotonic()
    while not engine.started:
        change = asyncio.ensure_future(engine.wait_for_change())
        try:
            await asyncio.wait({change}, timeout=max(0.0, reported_s + _SLOW_S - time.monotonic()))
        finally:
            change.cancel()
        now_s = time.monotonic()
        if now_s - reported_s >= _SLOW_S and not engine.started:
            reported_s = now_s
            models = engine.deployments()
            slow = [d.spec.name for d in models if d.state == "LOADING"]
            some = ", ".join(slow[:5]) + (", ..." if len(slow) > 5 else "")
            done = f"{len(models) - len(slow)} of {len(models)} models"
            log.info("loaded %s after %.0f s; still loading %s", done, now_s - began_s, some)


def startup_line(server: Server, took_s: float) -> None:
    """Log the content of the table as one line."""
    states = {f"{d.spec.name}/{d.spec.version}".rstrip("/"): d.reported_state for d in server.engine.deployments()}
    state = "ready" if server.engine.ready() else "started, not ready"
    addresses = {"http": server.http_url, "grpc": server.grpc_url}
    log.info("%s in %.2f s", state, took_s, extra={**addresses, "models": states})


def startup_table(server: Server, took_s: float) -> None:
    """Print models, versions, states, addresses and protocols."""
    rows = [("model", "version", "platform", "runs in", "state")]
    errors = []
    for deployment in server.engine.deployments():
        spec = deployment.spec
        state = deployment.reported_state
        rows.append((spec.name, spec.version or "-", deployment.platform or "-", deployment.placement, state.lower()))
        if deployment.reason:
            again = "; it is loaded again until that works" if deployment.retries else ""
            errors.append(f"  {spec.name}: {deployment.reason}{again}")
    for skipped in server.engine.skipped_files():
        rows.append((skipped.file, "-", "-", "-", "skipped"))
        errors.append(f"  {skipped.file}: {skipped.reason}")
    table = _align_columns(rows) if len(rows) > 1 else ["  no model is loaded yet"]
    lines = ["", *table, *(["", *errors] if errors else []), ""]
    url = server.http_url
    if url:
        lines.append(f"  HTTP  {', '.join(server.bound_urls)}   {', '.join(server.http_protocols)}")
    if server.grpc_url:
        lines.append(f"  gRPC  {server.bound_grpc_address}   {', '.join(server.grpc_protocols)}")
    if server.admin_url:
        lines.append(f"  admin {server.admin_url}   metrics, model control")
    if server.worker_port is not None:
        address = server.worker_port.address
        lines.append(f"  workers {address}   dragoman worker --join {address}")
    first = next((d.spec.name for d in server.engine.deployments() if d.ready), None)
    if first is not None and url:
        lines += ["", f"  try   curl {url}/v2/models/{first}"]
    if first is not None or server.engine.ready():
        lines += ["", f"  {'ready' if server.engine.ready() else 'started'} in {took_s:.2f} s; Ctrl-C stops"]
    lines.append("")
    text = "\n".join(map(_colour_state, lines) if sys.stderr.isatty() else lines)
    print(text, file=sys.stderr, flush=True)


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _colour_state(line: str) -> str:
    for word, colour in (("unavailable", "31"), (" ready", "32")):
        if line.endswith(word):
            return f"{line[: -len(word)]}\x1b[{colour}m{word}\x1b[0m"
    return line
