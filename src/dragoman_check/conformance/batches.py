"""Clauses of OpenAI's Files and Batches: files, and batches of requests to a model of arrays."""

import json
import time
from dataclasses import dataclass
from typing import Any

from dragoman_check.conformance.clauses import ClauseList, NotOffered, NotTried, Protocol, expect, field_of
from dragoman_check.conformance.http import HttpTarget, RecordedResponse
from dragoman_check.conformance.target import Target, find_tensor_model, with_request

_UNKNOWN = "dragoman-check-unknown"
_BOUNDARY = "dragoman-check"
_WAIT_S, _POLL_S = 60.0, 0.05
_STATUSES = ("validating", "in_progress", "finalizing")
CLAUSES = ClauseList("batches")
_add = CLAUSES.add


@dataclass(slots=True)
class BatchContext:
    """The server, and a request that one of its models answers."""

    http: HttpTarget
    url: str
    body: Any

    def upload(self, content: bytes, purpose: str = "batch") -> RecordedResponse:
        head = (
            f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
            f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="check.jsonl"\r\n\r\n'
        )
        form = head.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()
        return self.http.post("/v1/files", form, {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"})

    def line(self, custom_id: str, **changes: Any) -> bytes:
        line = {"custom_id": custom_id, "method": "POST", "url": self.url, "body": self.body, **changes}
        return json.dumps(line).encode() + b"\n"

    def create(self, file_id: str) -> RecordedResponse:
        body = {"input_file_id": file_id, "endpoint": self.url, "completion_window": "24h"}
        return self.http.post("/v1/batches", body)

    def run(self, content: bytes) -> Any:
        """Return a batch of these lines once it has ended."""
        file_id = field_of(self.upload(content).ok().json(), "id", str)
        batch = self.create(file_id).ok().json()
        end_s = time.monotonic() + _WAIT_S
        while field_of(batch, "status", str) in _STATUSES:
            expect(time.monotonic() < end_s, f"an end within {_WAIT_S:g} s", batch["status"])
            time.sleep(_POLL_S)
            batch = self.http.get(f"/v1/batches/{batch['id']}").ok().json()
        self.http.send("DELETE", f"/v1/files/{file_id}")
        return batch

    def results(self, file_id: Any) -> list[Any]:
        """Return the lines of a file of results, and delete it."""
        if file_id is None:
            return []
        lines = self.http.get(f"/v1/files/{file_id}/content").ok().json_lines()
        self.http.send("DELETE", f"/v1/files/{file_id}")
        return lines


def _prepare(target: Target) -> BatchContext:
    response = target.http.get("/v1/batches")
    if response.status in (404, 405, 501):
        raise NotOffered(f"GET v1/batches gets status {response.status}")
    model = with_request(find_tensor_model(target))
    if not model.samples:
        raise NotTried("no model of arrays answers a request")
    return BatchContext(target.http, f"{model.path}/infer", model.request())


def _check_file(file: Any, size: int) -> None:
    expect(field_of(file, "object", str) == "file", "the object 'file'", file["object"])
    expect(field_of(file, "bytes", int) == size, f"{size} bytes", file["bytes"])
    expect(field_of(file, "purpose", str) == "batch", "the purpose 'batch'", file["purpose"])
    expect(field_of(file, "filename", str) == "check.jsonl", "the filename 'check.jsonl'", file["filename"])
    field_of(file, "created_at", int)
    field_of(file, "id", str)


def _check_error(response: RecordedResponse) -> None:
    response.expect_rejected(400, 499)
    error = field_of(response.json(), "error", dict)
    expect(field_of(error, "message", str).strip(), "a message in 'error'", response.body)


@_add("file", "Files", changes_server=True)
def _file(c: BatchContext) -> None:
    """A file that is uploaded is described, returned as it was, listed and deleted."""
    content = c.line("a")
    file = c.upload(content).ok().json()
    _check_file(file, len(content))
    path = f"/v1/files/{file['id']}"
    _check_file(c.http.get(path).ok().json(), len(content))
    got = c.http.get(f"{path}/content").ok().body
    expect(got == content, f"the content {content!r}", got)
    listed = [each["id"] for each in field_of(c.http.get("/v1/files").ok().json(), "data", list)]
    expect(file["id"] in listed, f"'{file['id']}' in the list", listed)
    deleted = c.http.send("DELETE", path).ok().json()
    expect(field_of(deleted, "deleted", bool), "deleted true", deleted)
    expect(c.http.get(path).status == 404, "status 404 after that", "another one")


@_add("unknown-file", "Files")
def _unknown_file(c: BatchContext) -> None:
    """An unknown file gets status 404 and an error."""
    response = c.http.get(f"/v1/files/{_UNKNOWN}")
    expect(response.status == 404, "status 404", response.status)
    _check_error(response)


@_add("purpose", "Files")
def _purpose(c: BatchContext) -> None:
    """An upload with an unknown purpose gets status 400 and an error."""
    _check_error(c.upload(c.line("a"), _UNKNOWN))


@_add("results", "Batch", changes_server=True)
def _results(c: BatchContext) -> None:
    """Each line has one result, in the output file if it succeeded, else in the error file."""
    batch = c.run(c.line("a") + c.line("b", body={}) + c.line("c"))
    expect(batch["status"] == "completed", "the status 'completed'", batch["status"])
    counts = field_of(batch, "request_counts", dict)
    expect(counts == {"total": 3, "completed": 2, "failed": 1}, "2 of 3 completed", counts)
    output, errors = (c.results(batch.get(name)) for name in ("output_file_id", "error_file_id"))
    found = [field_of(line, "custom_id", str) for line in output]
    expect(sorted(found) == ["a", "c"], "the results of a and c", found)
    expect(all(line["response"]["status_code"] == 200 for line in output), "status_code 200", output)
    expect([line["custom_id"] for line in errors] == ["b"], "the error of b", errors)


@_add("invalid-line", "Batch", changes_server=True)
def _invalid_line(c: BatchContext) -> None:
    """A batch whose input has a line that is not JSON fails, and its errors name the line."""
    batch = c.run(c.line("a") + b"nonsense\n")
    expect(batch["status"] == "failed", "the status 'failed'", batch["status"])
    problems = field_of(field_of(batch, "errors", dict), "data", list)
    expect([each.get("line") for each in problems] == [2], "an error of line 2", problems)


@_add("unknown-input", "Batch")
def _unknown_input(c: BatchContext) -> None:
    """A batch of an unknown file is rejected."""
    _check_error(c.create(_UNKNOWN))


@_add("unknown-batch", "Batch")
def _unknown_batch(c: BatchContext) -> None:
    """An unknown batch gets status 404 and an error."""
    response = c.http.get(f"/v1/batches/{_UNKNOWN}")
    expect(response.status == 404, "status 404", response.status)
    _check_error(response)


@_add("list", "Batch")
def _list(c: BatchContext) -> None:
    """GET v1/batches returns a list of batches."""
    found = c.http.get("/v1/batches").ok().json()
    expect(field_of(found, "object", str) == "list", "the object 'list'", found["object"])
    expect(all(each["object"] == "batch" for each in field_of(found, "data", list)), "batches", found["data"])
    field_of(found, "has_more", bool)


PROTOCOL = Protocol("batches", "Files and Batches", "OpenAI API reference: Files, Batch", _prepare, CLAUSES)
