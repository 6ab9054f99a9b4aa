"""Forms of `multipart/form-data` (RFC 7578), without a copy of what they contain."""

import re
from typing import NamedTuple
from urllib.parse import unquote

from dragoman.core.datatypes import Buffer
from dragoman.core.errors import InvalidInput

_MAX_FIELDS = 32
_MAX_HEADER_BYTES = 8192
_MAX_BOUNDARY = 70  # RFC 2046, 5.1.1
_PARAMETER = re.compile(r';\s*([\w-]+\*?)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s"]*))')


class FormField(NamedTuple):
    """A field of a form. filename: "" if it is not a file."""

    name: str
    filename: str
    content: memoryview

    def text(self) -> str:
        """Raises InvalidInput if it is not UTF-8 or long."""
        if len(self.content) > _MAX_HEADER_BYTES:
            raise InvalidInput(f"`{self.name}`: expected at most {_MAX_HEADER_BYTES} bytes, got {len(self.content)}")
        try:
            return bytes(self.content).decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"`{self.name}`: expected UTF-8") from error


def parse_form(body: Buffer, content_type: str) -> dict[str, FormField]:
    """Return the fields of a form by name; of several with one name the last. Raises InvalidInput."""
    boundary = _parameters(content_type).get("boundary", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data" or not boundary:
        raise InvalidInput(f"content-type: expected multipart/form-data with a boundary, got {content_type[:100]!r}")
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise InvalidInput(f"content-type: expected a boundary of 1 to {_MAX_BOUNDARY} characters")
    view = memoryview(body)
    # The literal at its beginning makes the search fast.
    rest = rb"(--)?[ \t]*(?:\r\n|\Z)"
    delimiter = re.compile(re.escape(b"\r\n--" + boundary.encode()) + rest)
    found = re.compile(re.escape(b"--" + boundary.encode()) + rest).match(view) or delimiter.search(view)
    fields: dict[str, FormField] = {}
    while found is not None and found[1] is None:
        if len(fields) >= _MAX_FIELDS:
            raise InvalidInput(f"the form has more than {_MAX_FIELDS} fields")
        start = found.end()
        found = delimiter.search(view, start)
        if found is not None:
            field = _parse_field(view[start : found.start()])
            fields[field.name] = field
    if found is None:
        raise InvalidInput("the body is not a complete form: its last boundary is missing")
    return fields


def _parse_field(part: memoryview) -> FormField:
    head = bytes(part[:_MAX_HEADER_BYTES])
    end = head.find(b"\r\n\r\n")
    if end < 0:
        raise InvalidInput("a field of the form has no headers, or they are too long")
    parameters: dict[str, str] = {}
    for line in head[:end].decode(errors="replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            parameters = _parameters(value)
    name, filename = parameters.get("name", ""), parameters.get("filename", "")
    if not name:
        raise InvalidInput("a field of the form has no name: expected content-disposition: form-data; name=...")
    return FormField(name, filename, part[end + 4 :])


def _parameters(header: str) -> dict[str, str]:
    """Return the parameters of a header by name; one with a charset (RFC 8187) replaces the one without."""
    found: dict[str, str] = {}
    for key, quoted, plain in _PARAMETER.findall(header):
        found[key.lower()] = re.sub(r"\\(.)", r"\1", quoted) if quoted else plain
    for key in [key for key in found if key.endswith("*")]:
        charset, _, value = found[key].partition("'")
        if charset.lower() == "utf-8":
            found[key[:-1]] = unquote(value.partition("'")[2])
    return found
