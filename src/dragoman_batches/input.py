"""The input of a batch: one request a line, as OpenAI's Batch API has it."""

import mmap
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman_batches.batch import BatchProblem

# Problems that are reported of one input.
_MAX_PROBLEMS = 50
_MAX_ID = 512  # characters
ANY_ENDPOINT = "*"
_PATH = re.compile(r" - at `\$(.*)`$")


class Line(msgspec.Struct, frozen=True):
    """A line. method: POST. body: JSON of the request, as it is written."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Input:
    """The lines of a file. starts: offset of each line in bytes, and of the end of the last one."""

    def __init__(self, starts: "array[int]", data: bytes | mmap.mmap) -> None:
        self.starts, self.data = starts, data

    def __len__(self) -> int:
        return len(self.starts) - 1

    def line(self, number: int) -> Line:
        return _LINES.decode(self.raw(number))

    def raw(self, number: int) -> bytes:
        return self.data[self.starts[number] : self.starts[number + 1]]


class CheckedInput(NamedTuple):
    """An input with what is wrong with it."""

    input: Input
    problems: tuple[BatchProblem, ...]


_LINES = msgspec.json.Decoder(Line)


def map_file(path: Path) -> bytes | mmap.mmap:
    """Return the content of a file without reading it. Raises OSError."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def check_input(
    path: Path, *, endpoint: str, max_lines: int, max_line_bytes: int, role_of: Callable[[str], str]
) -> CheckedInput:
    """Read the lines of a file and check everything that can be known before they are sent. It blocks.

    endpoint: the `url` that all lines must have, or `*`. role_of: returns the role that POST to a path needs, "" for
    unknown paths. Raises OSError.
    """
    data = map_file(path)
    starts, problems = array("Q"), list[BatchProblem]()
    roles, ids = dict[str, str](), set[str]()
    at = end = number = 0
    while at < len(data) and len(problems) < _MAX_PROBLEMS:
        found = data.find(b"\n", at)
        end = found + 1 if found >= 0 else len(data)
        number += 1
        raw = data[at:end]
        if not raw.isspace():  # a blank line becomes white space after the JSON of the line before
            starts.append(at)
            if len(starts) > max_lines:
                text = f"expected at most {max_lines} lines: the setting max_batch_lines is the limit"
                problems.append(BatchProblem("too_many_lines", text))
                break
            try:
                _check_line(raw, endpoint, max_line_bytes, role_of, roles, ids)
            except _LineError as error:
                problems.append(BatchProblem(error.code, error.message, error.param, number))
        at = end
    if not starts and not problems:
        problems.append(BatchProblem("empty_file", "the input file has no lines"))
    starts.append(end)
    return CheckedInput(Input(starts, data), tuple(problems))


class _LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def _check_line(
    raw: bytes,
    endpoint: str,
    max_bytes: int,
    role_of: Callable[[str], str],
    roles: dict[str, str],
    ids: set[str],
) -> None:
    if len(raw) > max_bytes:
        raise _LineError("line_too_large", f"expected at most {max_bytes} bytes, got {len(raw)}")
    try:
        line = _LINES.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text, path = explain(error)
        code = (
            "invalid_json_line" if path is None and not isinstance(error, msgspec.ValidationError) else "invalid_line"
        )
        raise _LineError(code, text, path) from error
    if not line.custom_id or len(line.custom_id) > _MAX_ID:
        raise _LineError("invalid_custom_id", f"`custom_id`: expected 1 to {_MAX_ID} characters", "custom_id")
    if line.custom_id in ids:
        raise _LineError("duplicate_custom_id", f"`custom_id`: '{line.custom_id[:100]}' is not unique", "custom_id")
    ids.add(line.custom_id)
    if line.method != "POST":
        raise _LineError("invalid_method", f"`method`: expected POST, got {line.method[:20]!r}", "method")
    if endpoint not in (ANY_ENDPOINT, line.url):
        text = f"`url`: expected the endpoint of the batch, {endpoint}, got {line.url[:200]!r}"
        raise _LineError("mismatched_endpoint", text, "url")
    if line.url not in roles:
        roles[line.url] = role_of(line.url)
    if roles[line.url] != "infer":
        expected = "a path for inference, such as /v1/chat/completions or /v2/models/NAME/infer"
        raise _LineError("invalid_url", f"`url`: expected {expected}, got {line.url[:200]!r}", "url")
    if not bytes(line.body).startswith(b"{"):
        raise _LineError("invalid_body", "`body`: expected an object", "body")


def explain(error: Exception) -> tuple[str, str | None]:
    """Return the text of an error of msgspec with the field that it is about, and the field."""
    text = str(error)
    found = _PATH.search(text)
    if found is None:
        name = re.search(r"missing required field `(\w+)`", text)
        return (f"`{name[1]}`: this field is required", name[1]) if name else (text, None)
    path, reason = found[1].lstrip("."), text[: found.start()]
    name = re.search(r"missing required field `(\w+)`", reason)
    if name:
        path = f"{path}.{name[1]}" if path else name[1]
        return f"`{path}`: this field is required", path
    return f"`{path}`: {reason[:1].lower()}{reason[1:]}", path


def convert(value: Any, type_: Any) -> Any:
    """Return a value of JSON as a struct. Raises InvalidInput that names the field."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise InvalidInput(explain(error)[0]) from error
