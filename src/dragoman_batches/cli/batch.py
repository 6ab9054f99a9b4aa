"""`dragoman batch FILE`: run the requests in a file, one a line, with models here or on a server."""

import argparse
import asyncio
import hashlib
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dragoman.cli.connection import KEY_HELP, ServerConnection, add_credentials
from dragoman.core.callers import ANYONE
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.core.services import WireResponse
from dragoman_batches.batch import ENDED
from dragoman_batches.files import write_file
from dragoman_batches.input import ANY_ENDPOINT, check_input
from dragoman_batches.journal import Journal, publish, select
from dragoman_batches.results import format_result, line_id
from dragoman_batches.runner import LineGate, LineRun

_EPILOG = f"""\
A line of FILE is a request, as for OpenAI's Batch API; url is the path of any protocol that the server speaks:
  {{"custom_id": "a", "method": "POST", "url": "/v2/models/iris/infer", "body": {{"inputs": [...]}}}}
  {{"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {{"model": "m", "messages": [...]}}}}
The results of requests that succeeded go to FILE.output.jsonl, those of others to FILE.errors.jsonl, each in the order
of FILE. With --model, a run that was interrupted goes on where it was when the same command is given again.

{KEY_HELP}
examples:
  dragoman batch requests.jsonl --model model.onnx
  dragoman batch requests.jsonl --model models/ --model extra.py:function --output results.jsonl
  dragoman batch requests.jsonl --url http://127.0.0.1:8080

Exit status: 0 if all requests succeeded, 1 if some failed, 2 if the file is invalid or the server cannot be reached.
"""
_POLL_S = 0.2
_FORM_LIMIT = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.usage = "dragoman batch FILE (--model PATH ... | --url URL) [options]"
    parser.description = "Run the requests in a file, one a line."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("file", metavar="FILE", help="requests as lines of JSON")
    add("--model", action="append", default=[], metavar="PATH", help="what dragoman serve takes; may be repeated")
    add("--url", default="", metavar="URL", help="a running server, instead of models")
    add("--output", default="", metavar="FILE", help="results of requests that succeeded (default: FILE.output.jsonl)")
    add("--errors", default="", metavar="FILE", help="results of others (default: FILE.errors.jsonl)")
    add("--calls", type=int, default=16, metavar="N", help="requests at the same time, with --model (default: 16)")
    add("--window", default="24h", metavar="TIME", help="time for a server to finish, such as 30m (default: 24h)")
    add("--json", action="store_true", help="print the counts as JSON, for programs")
    add_credentials(add)
    add("--timeout-s", type=float, default=300.0, metavar="S", help="time for each answer of a server (default: 300)")


def run(arguments: argparse.Namespace) -> int:
    """Run the batch; return the exit status."""
    source = Path(arguments.file)
    if not source.is_file():
        raise InvalidInput(f"expected a file of requests, got '{source}'")
    if bool(arguments.model) == bool(arguments.url):
        raise InvalidInput("expected either --model PATH or --url URL")
    output = Path(arguments.output or f"{source}.output.jsonl")
    errors = Path(arguments.errors or f"{source}.errors.jsonl")
    if arguments.url:
        counts = _run_on_server(ServerConnection.of(arguments, arguments.url), source, output, errors, arguments.window)
    else:
        if arguments.calls < 1:
            raise InvalidInput(f"--calls: expected a number from 1, got {arguments.calls}")
        counts = _run_here(arguments.model, source, output, errors, arguments.calls)
    if arguments.json:
        print(json.dumps(counts))
    else:
        print(f"{counts['completed']} of {counts['total']} requests succeeded: {output}")
        if counts["failed"]:
            print(f"{counts['failed']} failed: {errors}", file=sys.stderr)
    return 0 if counts["completed"] == counts["total"] else 1


# --- without a server ------------------------------------------------------------------------------------


def _run_here(models: list[str], source: Path, output: Path, errors: Path, most: int) -> dict[str, int]:
    """Run the lines with an application in this process. The journal beside the output is the progress."""
    checksum = hashlib.sha256(source.read_bytes()).hexdigest()[:24]
    progress = output.with_name(f"{output.name}.{checksum[:12]}.part")
    journal = Journal(progress)
    try:
        asyncio.run(_send_lines(models, source, journal, f"batch_{checksum}", most))
        journal.sync()
    finally:
        journal.close()
    if journal.failed:
        write_file(output, select(progress, succeeded=True))
        write_file(errors, select(progress, succeeded=False))
    else:
        publish(progress, output)
        errors.unlink(missing_ok=True)
    progress.unlink()
    return {"total": journal.lines, "completed": journal.succeeded, "failed": journal.failed}


async def _send_lines(models: list[str], source: Path, journal: Journal, batch_id: str, most: int) -> None:
    import dragoman

    application = dragoman.asgi(*models)
    async with application:
        sender = application.sender
        checked = check_input(
            source, endpoint=ANY_ENDPOINT, max_lines=sys.maxsize, max_line_bytes=1 << 30, role_of=sender.route
        )
        if checked.problems:
            first = checked.problems[0]
            raise InvalidInput(f"'{source}'" + (f", line {first.line}" if first.line else "") + f": {first.message}")

        async def send(path: str, body: bytes, request_id: str) -> WireResponse:
            return await sender.send(path, body, ANYONE, None, request_id)

        def format_line(number: int, custom_id: str, response: WireResponse) -> bytes:
            return format_result("openai", batch_id, number, custom_id, response)

        lines = LineRun(
            checked.input,
            journal,
            send,
            format_line,
            LineGate(most, lambda: False),
            deadline_s=float("inf"),
            line_id=lambda number: line_id(batch_id, number),
        )
        with _progress(lambda: (journal.lines, len(checked.input))):
            await lines.run()


# --- on a server -----------------------------------------------------------------------------------------


def _run_on_server(
    connection: ServerConnection, source: Path, output: Path, errors: Path, window: str
) -> dict[str, int]:
    """Upload the file, wait for the batch, and save its files."""
    file = _request(connection, "POST", "/v1/files", *_form(source))
    body = {"input_file_id": file["id"], "endpoint": "*", "completion_window": window}
    batch = _request(connection, "POST", "/v1/batches", json.dumps(body).encode(), "application/json")
    with _progress(lambda: (_done(batch), batch["request_counts"]["total"])) as show:
        while batch["status"] not in ENDED:
            time.sleep(_POLL_S)
            batch = _request(connection, "GET", f"/v1/batches/{batch['id']}")
            show()
    for path, name in ((output, "output_file_id"), (errors, "error_file_id")):
        path.unlink(missing_ok=True)
        if batch[name] is not None:
            with connection.open(f"/v1/files/{batch[name]}/content") as response, path.open("wb") as target:
                while chunk := response.read(_FORM_LIMIT):
                    target.write(chunk)
    if batch["status"] != "completed":
        problem = (batch["errors"] or {"data": [{"message": batch["status"], "line": None}]})["data"][0]
        place = f"line {problem['line']}: " if problem.get("line") else ""
        raise InvalidInput(f"batch {batch['id']} is {batch['status']}: {place}{problem['message']}")
    _request(connection, "DELETE", f"/v1/files/{file['id']}")
    return {name: int(batch["request_counts"][name]) for name in ("total", "completed", "failed")}


def _done(batch: dict[str, Any]) -> int:
    return int(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])


def _form(source: Path) -> tuple[bytes, str]:
    boundary = uuid.uuid4().hex
    name = source.name.replace('"', "_").replace("\\", "_")
    head = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    )
    body = head.encode() + source.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}"


def _request(
    connection: ServerConnection, method: str, path: str, body: bytes | None = None, content_type: str = ""
) -> Any:
    with connection.open(path, data=body, content_type=content_type, method=method) as response:
        return parse_json(response.read())


@contextmanager
def _progress(counts: Callable[[], tuple[int, int]]) -> Iterator[Callable[[], None]]:
    """Show progress on standard error if it is a terminal."""
    shows = sys.stderr.isatty()

    def show() -> None:
        done, total = counts()
        if shows and total:
            print(f"\r{done} of {total}", end="", file=sys.stderr, flush=True)

    yield show
    if shows:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
